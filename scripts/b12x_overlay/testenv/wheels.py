# SPDX-License-Identifier: Apache-2.0
"""The pinned wheels of the test environment: which they are, and their download with a checksum."""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from b12x_overlay.bootstrap import SetupError
from b12x_overlay.paths import PATCHES, REQUIREMENTS, build_dir

PROVIDERS = ("b12x-flashinfer", "b12x-pypi")


@dataclass(frozen=True)
class Wheel:
    """One pinned wheel: pip requirement, file name, sha256 (hex)."""

    requirement: str
    filename: str
    sha256: str


def provider_wheel(name: str) -> Wheel:
    """The wheel of a b12x provider, ``"b12x-flashinfer"`` or ``"b12x-pypi"``."""
    table = tomllib.loads((REQUIREMENTS / "test-wheels.toml").read_text(encoding="utf-8"))[name]
    return Wheel(**table)


def vllm_wheel(machine: str = "") -> Wheel:
    """The pinned vLLM wheel for *machine* (default: this one); its Python files are the same for every machine.

    Raises:
        SetupError: vLLM has no wheel for this machine.
    """
    machine = machine or platform.machine()
    patchset = tomllib.loads((PATCHES / "patchset.toml").read_text(encoding="utf-8"))
    pin: dict[str, Any] = patchset["pin"]
    for wheel in pin["wheels"]:
        if wheel["filename"].endswith(f"_{machine}.whl"):
            return Wheel(f"vllm=={pin['version']}", wheel["filename"], wheel["sha256"])
    raise SetupError(
        f"vLLM {pin['version']} has no wheel for {machine}; run the tests on x86_64 or aarch64 Linux"
    )


def fetch(wheel: Wheel, python: Path | str = sys.executable) -> Path:
    """Download *wheel* into build/sources with pip (so that pip's settings hold), check it, return its path.

    Raises:
        SetupError: the download failed, or the file's sha256 is not the pinned one (the file is removed).
    """
    folder = build_dir() / "sources"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / wheel.filename
    if not path.exists():
        print(f"downloading {wheel.filename}", file=sys.stderr, flush=True)
        result = subprocess.run(
            [
                str(python), "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input",
                "--no-deps", "--only-binary=:all:", "--dest", str(folder), wheel.requirement,
            ],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if result.returncode != 0 or not path.exists():
            raise SetupError(
                f"pip could not download {wheel.filename}; check the network or pip's index settings, or put the "
                f"file into {folder}, then run the command again\n{result.stderr.strip()}"
            )
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wheel.sha256:
        path.unlink()
        raise SetupError(
            f"{path}: sha256 is {found}, wanted {wheel.sha256}; removed. Run the command again, and if it stays so, "
            "ask who changed the file on the index."
        )
    return path
