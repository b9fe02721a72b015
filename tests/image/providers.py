# SPDX-License-Identifier: Apache-2.0
"""Site folders in which ``import b12x`` gives one provider or the other, made from the two real wheels.

A  flashinfer-python alone            E  C after ``pip uninstall b12x``
B  PyPI's b12x alone                  F  D after ``pip uninstall flashinfer-python``
C  flashinfer-python, then b12x       G  a source tree of b12x, of no distribution
D  b12x, then flashinfer-python       H  D with an edited ``b12x/__init__.py``
"""

from __future__ import annotations

import shutil
from pathlib import Path

from support.paths import site


def make_states(folder: Path) -> dict[str, Path]:
    """Make all states below *folder*; large folders are linked, not copied."""
    bundled, pypi = site("b12x-flashinfer"), site("b12x-pypi")
    states = {name: folder / name for name in "ABCDEFGH"}
    for path in states.values():
        path.mkdir()
    for name in "ACDEH":
        _link(bundled / "flashinfer", states[name])
    for name in "ACDEH":
        _copy_info(bundled, "flashinfer_python-*.dist-info", states[name])
    for name in "BCDFH":
        _copy_info(pypi, "b12x-*.dist-info", states[name])
    for name in "BCDFGH":
        (states[name] / "b12x").mkdir()
        for entry in (pypi / "b12x").iterdir():
            if entry.name != "__init__.py":
                _link(entry, states[name] / "b12x")
    for name in "BCG":
        shutil.copy2(pypi / "b12x" / "__init__.py", states[name] / "b12x")
    for name in "ADH":
        (states[name] / "b12x").mkdir(exist_ok=True)
        shutil.copy2(bundled / "b12x" / "__init__.py", states[name] / "b12x")
    with (states["H"] / "b12x" / "__init__.py").open("a") as stream:
        stream.write("# edited\n")
    return states


def _link(source: Path, folder: Path) -> None:
    (folder / source.name).symlink_to(source, target_is_directory=source.is_dir())


def _copy_info(source: Path, pattern: str, folder: Path) -> None:
    for info in source.glob(pattern):
        shutil.copytree(info, folder / info.name)
