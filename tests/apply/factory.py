# SPDX-License-Identifier: Apache-2.0
"""Makes small patch sets, trees, packages and wheels for the tests, and runs the real command on them."""

from __future__ import annotations

import difflib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from b12x_overlay.patching import record
from b12x_overlay.patching.diff import split_lines
from b12x_overlay.patching.entry import Entry
from b12x_overlay.patching.patchset import sha256

REPO = Path(__file__).resolve().parents[2]
VERSION = "0.33.0"
PYTHON = sys.executable


def unified(path: str, old: bytes, new: bytes, *, context: int = 3) -> bytes:
    """A unified diff with git's header, from the standard library (not from the code under test)."""
    lines = difflib.diff_bytes(
        difflib.unified_diff,
        split_lines(old),
        split_lines(new),
        f"a/{path}".encode(),
        f"b/{path}".encode(),
        n=context,
    )
    out = [f"diff --git a/{path} b/{path}\n".encode()]
    for line in lines:
        out.append(line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n")
    return b"".join(out)


@dataclass
class Series:
    """A patch set under construction: base files, patches over them, overlay files."""

    base: dict[str, bytes]
    patches: list[tuple[str, dict[str, bytes], dict[str, bytes]]] = field(default_factory=list)
    """Name, files after the patch, overlay files."""

    def add(
        self, name: str, after: Mapping[str, bytes], overlay: Mapping[str, bytes] | None = None
    ) -> Series:
        """Append a patch; returns self."""
        self.patches.append((name, dict(after), dict(overlay or {})))
        return self

    def final(self) -> dict[str, bytes]:
        """Base with all patches and overlay files."""
        files = dict(self.base)
        for _, after, overlay in self.patches:
            files |= after | overlay
        return files


@dataclass
class Project:
    """A copy of this repository's scripts with its own patches/ and overlay/."""

    root: Path
    env: dict[str, str]

    @property
    def command(self) -> Path:
        """Its scripts/apply-patches."""
        return self.root / "scripts" / "apply-patches"

    def write(self, series: Series, *, revision: int = 1, extra: str = "") -> Project:
        """Replace patches/ and overlay/ by *series*."""
        for name in ("patches", "overlay"):
            shutil.rmtree(self.root / name, ignore_errors=True)
            (self.root / name).mkdir()
        current = dict(series.base)
        text = [pin_text(revision)]
        for name, after, overlay in series.patches:
            body = b"".join(unified(path, current[path], data) for path, data in after.items())
            self.write_patch(name, body)
            text.append(
                patch_text(
                    name, {path: (current[path], data) for path, data in after.items()}, overlay
                )
            )
            current |= after
            for path, data in overlay.items():
                place(self.root / "overlay", path, data)
        (self.root / "patches" / "patchset.toml").write_text("\n".join(text) + extra)
        return self

    def write_patch(self, name: str, body: bytes) -> None:
        """Write patches/NAME.patch."""
        head = f"From: A <a@example.invalid>\nDate: Sun, 1 Nov 2026 10:00:00 +0000\nSubject: {name}\n\nPatch: {name}\n\n"
        (self.root / "patches" / f"{name}.patch").write_bytes(head.encode() + body)

    def run(
        self,
        *args: str | Path,
        python: Sequence[str] = (PYTHON,),
        env: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> Result:
        """Run the command as a user does, in its own process."""
        done = subprocess.run(
            [*python, str(self.command), *map(str, args)],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            env={**self.env, **(env or {})},
            check=False,
            **kwargs,
        )
        return Result(done.returncode, done.stdout.decode(), done.stderr.decode())

    def json(self, *args: str | Path, **kwargs: Any) -> dict[str, Any]:
        """Run with --json and parse stdout."""
        result = self.run(*args, "--json", **kwargs)
        document: dict[str, Any] = json.loads(result.out)
        assert document.get("exit", result.code) == result.code
        return document


@dataclass(frozen=True)
class Result:
    """A finished run."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """Both streams."""
        return self.out + self.err


def project(folder: Path) -> Project:
    """Copy the scripts into *folder*."""
    shutil.copytree(
        REPO / "scripts" / "b12x_overlay", folder / "scripts" / "b12x_overlay",
        ignore=lambda path, names: [
            name for name in names
            if name == "__pycache__" or (Path(path).name == "b12x_overlay" and (Path(path) / name).is_dir() and name != "patching")
        ],
    )  # fmt: skip
    shutil.copytree(REPO / "scripts" / "requirements", folder / "scripts" / "requirements")
    shutil.copy2(REPO / "scripts" / "apply-patches", folder / "scripts" / "apply-patches")
    env = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("GIT_", "PYTHON", "PYTEST"))
    }
    return Project(folder, env | {"B12X_OVERLAY_BUILD": str(folder / "build")})


def pin_text(revision: int = 1) -> str:
    """The head of a patchset.toml."""
    zero = "0" * 64
    return (
        f'schema = 1\nrevision = {revision}\n\n[pin]\nversion = "{VERSION}"\ncommit = "abc"\n'
        f'sdist = {{ filename = "vllm-{VERSION}.tar.gz", sha256 = "{zero}" }}\nwheels = []\n'
    )


def patch_text(
    name: str, files: Mapping[str, tuple[bytes, bytes]], overlay: Mapping[str, bytes]
) -> str:
    """One [[patch]]."""
    rows = "".join(
        f'\n[[patch.file]]\npath = "{path}"\nbefore = "{sha256(old)}"\nafter = "{sha256(new)}"\n'
        for path, (old, new) in files.items()
    )
    return (
        f'\n[[patch]]\nname = "{name}"\nwhat = "w"\nwhy = "y"\nuntil = "u"\nfragments = []\n'
        f"overlay = {json.dumps(list(overlay))}\n{rows}"
    )


def place(root: Path, path: str, data: bytes, mode: int | None = None) -> Path:
    """Write a file below *root*."""
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    if mode is not None:
        target.chmod(mode)
    return target


def lay(root: Path, files: Mapping[str, bytes]) -> Path:
    """Write files below *root*, with vllm/__init__.py."""
    place(root, "vllm/__init__.py", b"")
    for path, data in files.items():
        place(root, path, data)
    return root


def lay_installed(
    site: Path, files: Mapping[str, bytes], *, version: str = VERSION, end: str = "\n"
) -> Path:
    """An installed package with METADATA and RECORD."""
    files = {"vllm/__init__.py": b"", **files}
    lay(site, files)
    info = f"vllm-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n\n".encode()
    place(site, f"{info}/METADATA", metadata)
    place(site, f"{info}/INSTALLER", b"pip\n")
    rows = {**files, f"{info}/METADATA": metadata, f"{info}/INSTALLER": b"pip\n"}
    text = record.update(b"", {path: Entry(data) for path, data in rows.items()})
    text += f"{info}/RECORD,,\n".encode()
    place(site, f"{info}/RECORD", text.replace(b"\n", end.encode()))
    return site


def snapshot(root: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below *root* with bytes and mode; folders too, so that empty ones show."""
    result = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_symlink():
            result[name] = (os.fsencode(path.readlink()), 0)
        elif path.is_dir():
            result[name + "/"] = (b"", path.stat().st_mode & 0o777)
        else:
            result[name] = (path.read_bytes(), path.stat().st_mode & 0o7777)
    return result


def contents(root: Path) -> dict[str, bytes]:
    """Files below *root* without modes."""
    return {name: data for name, (data, _) in snapshot(root).items() if not name.endswith("/")}


def run_python(code: str, cwd: Path) -> str:
    """What *code* prints in a fresh process that starts in *cwd* and writes bytecode."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    command = [PYTHON, "-c", code]
    return subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, check=True
    ).stdout.strip()
