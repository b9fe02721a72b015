# SPDX-License-Identifier: Apache-2.0
"""The folders under build/test-env that tests put on PYTHONPATH, one per package.

``stock``            vLLM's wheel without its compiled files
``patched``          ``stock`` with this repository's patch set, by scripts/apply-patches
``b12x-flashinfer``  the b12x that flashinfer-python bundles, without the rest of flashinfer
``b12x-pypi``        the b12x of PyPI

Compiled files are left out because they need a CUDA driver to load; the Python code runs without them.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from b12x_overlay.bootstrap import SetupError
from b12x_overlay.paths import OVERLAY, PATCHES, REPO, build_dir
from b12x_overlay.testenv import wheels

_STAMP = ".made-from"
# C++ headers and a command line tool: 1,900 files that no test reads.
_VLLM_LEFT_OUT = (
    "vllm/third_party/deep_gemm/include/",
    "vllm/third_party/fmha_sm100/cutlass/",
    "vllm/vllm-rs",
)


def site(name: str) -> Path:
    """Path of the folder *name*, whether or not it exists yet."""
    return build_dir() / "test-env" / name


def ensure_all() -> None:
    """Make or renew every folder that is missing or was made from something else than it would be made from now.

    Raises:
        SetupError: a download failed or the patch set does not apply.
    """
    site("").mkdir(parents=True, exist_ok=True)
    with _locked(site(".lock")):
        stock = wheels.vllm_wheel()
        _ensure("stock", stock.sha256, lambda to: _unpack(wheels.fetch(stock), to, _wanted_of_vllm))
        for name in wheels.PROVIDERS:
            wheel = wheels.provider_wheel(name)
            _ensure(name, wheel.sha256, lambda to, w=wheel: _unpack_provider(wheels.fetch(w), to))  # type: ignore[misc]
        _ensure("patched", f"{stock.sha256} {patch_set_digest()}", _patch)


def patch_set_digest() -> str:
    """sha256 over the names and bytes of everything in patches/ and overlay/, and of the code that applies it."""
    digest = hashlib.sha256()
    for root in (PATCHES, OVERLAY, REPO / "scripts" / "b12x_overlay" / "patching"):
        for path in sorted(root.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                content = path.read_bytes()
                digest.update(f"{path.relative_to(REPO)}\0{len(content)}\0".encode())
                digest.update(content)
    return digest.hexdigest()


def _ensure(name: str, made_from: str, make: Callable[[Path], None]) -> None:
    folder = site(name)
    stamp = folder / _STAMP
    if stamp.exists() and stamp.read_text(encoding="utf-8") == made_from:
        return
    _say(f"making {folder}")
    fresh = site(f".{name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    make(fresh)
    (fresh / _STAMP).write_text(made_from, encoding="utf-8")
    if folder.exists():
        old = site(f".{name}.old")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        fresh.rename(folder)
        shutil.rmtree(old)
    else:
        fresh.rename(folder)


def _unpack(wheel: Path, to: Path, wanted: Callable[[str], bool]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(to, [name for name in archive.namelist() if wanted(name)])


def _wanted_of_vllm(name: str) -> bool:
    return not name.endswith(".so") and not name.startswith(_VLLM_LEFT_OUT)


def _wanted_of_provider(name: str) -> bool:
    return name.startswith(("b12x/", "flashinfer/experimental/")) or ".dist-info/" in name


def _unpack_provider(wheel: Path, to: Path) -> None:
    _unpack(wheel, to, _wanted_of_provider)
    if (to / "flashinfer").exists():
        # flashinfer's own __init__ imports its CUDA code; the bundled b12x needs only the package to exist.
        (to / "flashinfer" / "__init__.py").write_text("", encoding="utf-8")


def _patch(to: Path) -> None:
    """Fill *to* with hard links to stock's files (bytecode too), then apply the patch set, which replaces files."""
    shutil.copytree(site("stock"), to, copy_function=os.link, dirs_exist_ok=True)
    (to / _STAMP).unlink()
    script = REPO / "scripts" / "apply-patches"
    command = [sys.executable, str(script), "apply", "--target", str(to)]
    result = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        output = f"{result.stdout}{result.stderr}".strip()
        raise SetupError(f"the patch set does not apply: {' '.join(command)}\n{output}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("waiting for another run that makes the test environment")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
