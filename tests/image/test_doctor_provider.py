# SPDX-License-Identifier: Apache-2.0
"""Which b12x an import gives, in every state that pip can leave, compared with a real import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.paths import SCRIPTS

FLASHINFER, PYPI = "flashinfer-python", "b12x"
IMPORT = "import b12x, json; print(json.dumps([b12x.__file__, list(b12x.__path__)]))"
ABILITIES = """
import importlib, inspect, json
fused = importlib.import_module("b12x.moe.fused_moe")
impl = importlib.import_module("b12x.moe.fused_moe._impl")
bind = inspect.signature(impl.TPMoEScratchPlan.bind).parameters
plan = inspect.signature(impl.plan_b12x_fp4_moe_weights).parameters
print(json.dumps({
    "fused_moe": all(hasattr(fused, name) for name in ("Caps", "plan", "plan_weights", "bind", "run")),
    "dual_plan": "quant_modes" in plan and "w13_layout" in plan,
    "a4_prefill": "a4_prefill" in bind,
    "csf": hasattr(fused, "expand_scales") and hasattr(fused, "Nvfp4CsfWeights"),
}))
"""


def environment(*paths: Path) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "B12X_", "CUDA_"))}
    return {**clean, "PYTHONPATH": os.pathsep.join(map(str, paths))}


def doctor(*paths: Path) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, SCRIPTS / "doctor", "--json"],
        env=environment(*paths), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode in (0, 1), result.stderr
    return json.loads(result.stdout)


def real_import(*paths: Path) -> tuple[Path | None, Path]:
    """``__file__`` and the package folder after a real import."""
    out = subprocess.run(
        [sys.executable, "-c", IMPORT], env=environment(*paths), capture_output=True, text=True, check=True
    )  # fmt: skip
    file, folders = json.loads(out.stdout)
    return Path(file).resolve() if file else None, Path(folders[0]).resolve()


@pytest.mark.parametrize(
    ("state", "provider", "owners", "clash"),
    [
        ("A", FLASHINFER, [FLASHINFER], False),
        ("B", PYPI, [PYPI], False),
        ("C", PYPI, [FLASHINFER, PYPI], True),
        ("D", FLASHINFER, [FLASHINFER, PYPI], True),
        ("G", "unknown", [], False),
        ("H", "unknown", [FLASHINFER, PYPI], True),
    ],
)
def test_the_provider_is_the_one_that_an_import_gives(
    provider_states: dict[str, Path], state: str, provider: str, owners: list[str], clash: bool
) -> None:
    found = doctor(provider_states[state])["b12x"]
    assert (found["provider"], found["owners"], found["clash"]) == (provider, owners, clash)
    file, folder = real_import(provider_states[state])
    assert found["abilities"]["csf"] == ("flashinfer" in str(file))
    if provider == FLASHINFER:
        assert folder.parts[-3:] == ("flashinfer", "experimental", "b12x")
    else:
        assert "flashinfer" not in folder.parts or state == "H"


def test_a_clash_is_a_warning_that_names_the_way_out(provider_states: dict[str, Path]) -> None:
    for state in "CD":
        report = doctor(provider_states[state])
        (finding,) = [f for f in report["findings"] if "two packages own" in f["text"]]
        assert finding["level"] == "warning"
        assert "pip uninstall -y b12x" in finding["fix"]
        assert "flashinfer-python==0.7.2.post1" in finding["fix"]


def test_plugins_that_cannot_load_are_named(provider_states: dict[str, Path]) -> None:
    texts = {s: " ".join(f["text"] for f in doctor(provider_states[s])["findings"]) for s in "CD"}
    assert "b12x_fp6" in texts["D"]
    assert "b12x_fp6" not in texts["C"]


@pytest.mark.parametrize(("state", "provider"), [("E", "none"), ("F", "broken")])
def test_what_an_uninstall_leaves_is_broken(
    provider_states: dict[str, Path], state: str, provider: str
) -> None:
    report = doctor(provider_states[state])
    assert report["b12x"]["provider"] == provider
    assert report["b12x"]["abilities"]["fused_moe"] is False


@pytest.mark.parametrize("state", ["A", "B"])
def test_abilities_read_from_source_are_those_of_the_imported_library(
    provider_states: dict[str, Path], state: str
) -> None:
    out = subprocess.run(
        [sys.executable, "-c", ABILITIES],
        env=environment(provider_states[state]), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if out.returncode and "No module named" in out.stderr:
        pytest.skip(f"the test environment lacks what b12x imports: {out.stderr.splitlines()[-1]}")
    assert out.returncode == 0, out.stderr
    assert doctor(provider_states[state])["b12x"]["abilities"] == json.loads(out.stdout)


def test_the_first_of_two_copies_on_the_path_counts(provider_states: dict[str, Path]) -> None:
    """Two site folders do not clash: each provider has its own b12x/__init__.py."""
    found = doctor(provider_states["B"], provider_states["A"])["b12x"]
    assert (found["provider"], found["owners"], found["clash"]) == (PYPI, [PYPI], False)
    assert real_import(provider_states["B"], provider_states["A"])[0] == Path(found["origin"])


def test_it_imports_neither_torch_nor_vllm_nor_b12x(provider_states: dict[str, Path]) -> None:
    code = (
        "import runpy, sys; sys.argv = ['doctor']\n"
        "try: runpy.run_path(sys.path.pop(0) + '/doctor', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'vllm', 'b12x', 'flashinfer'} & set(sys.modules)))"
    )
    out = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(SCRIPTS)!r})\n{code}"],
        env=environment(provider_states["A"]), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert out.stdout.splitlines()[-1] == "[]"
