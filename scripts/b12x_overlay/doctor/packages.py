# SPDX-License-Identifier: Apache-2.0
"""Installed packages, read from their metadata and files: nothing of them is imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

SHOWN = ("vllm", "torch", "triton", "flashinfer-python", "b12x", "nvidia-cutlass-dsl")
"""The packages whose versions decide what works, in the order in which they are shown."""

_PIN = re.compile(r"^([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?\s*==\s*([^;,\s]+)\s*$")


@dataclass(frozen=True)
class Installed:
    """One distribution: its version and the folder (site-packages, dist-packages) that holds it."""

    name: str
    version: str
    site: Path
    distribution: importlib.metadata.Distribution


def find(name: str) -> Installed | None:
    """The distribution *name* that this interpreter sees first, or None."""
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    version = found.metadata["Version"] or "unknown"  # a broken dist-info has none
    return Installed(name, version, Path(str(found.locate_file(""))).resolve(), found)


def package_folder(name: str) -> Path | None:
    """The folder that ``import name`` would use, or None; the package is not imported."""
    try:
        spec = importlib.util.find_spec(
            name
        )  # of a top-level name: imports nothing, sees editable installs
    except ValueError:
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))).resolve()


def versions() -> dict[str, str | None]:
    """Version of each package of :data:`SHOWN`, None where it is not installed."""
    return {name: (found.version if (found := find(name)) else None) for name in SHOWN}


def exact_pins(owner: Installed) -> dict[str, str]:
    """The ``==`` requirements of *owner* that hold without an extra: {name: version}."""
    pins = {}
    for requirement in owner.distribution.requires or []:
        text, _, marker = requirement.partition(";")
        if marker.strip():
            continue
        match = _PIN.match(text.strip())
        if match:
            pins[match[1].lower().replace("_", "-")] = match[2]
    return pins


def torch_cuda() -> str | None:
    """CUDA version that the installed torch was built for ("13.0"), None for a CPU build or no torch.

    Read from ``torch/version.py``: importing torch takes seconds and may start CUDA.
    """
    folder = package_folder("torch")
    if folder is None:
        return None
    try:
        text = (folder / "version.py").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([0-9.]+)['\"]", text, re.MULTILINE)
    return match[1] if match else None
