# SPDX-License-Identifier: Apache-2.0
"""The hooks close no circle of imports: whatever module of vLLM is imported first, as a model is when vLLM inspects it.

vLLM imports a model's module alone in a fresh process to look at its class, so the first import differs from model to
model, and a circle shows for some models only.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.child import run_child
from support.import_graph import ImportGraph
from support.paths import site

FIRST = [
    "vllm.model_executor.models.qwen3",  # dense: models.utils before anything of fused_moe
    "vllm.model_executor.models.deepseek_v2",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.model_loader.nvfp4_csf_loader",
    "vllm.model_executor.layers.quantization.modelopt",
    "vllm.model_executor.layers.quantization.nvfp4_csf.method",
    "vllm.model_executor.warmup.b12x_warmup",
]


def new_imports(released: ImportGraph, patched: ImportGraph) -> list[tuple[str, str]]:
    """``(upstream module, what it imports)`` where the patches add the import."""
    return [
        (name, target)
        for name in sorted(released.modules)
        if released.modules[name].path.read_bytes() != patched.modules[name].path.read_bytes()
        for target in sorted(patched.direct(name) - released.direct(name))
    ]


def test_no_hook_imports_what_imports_it_back() -> None:
    released, patched = ImportGraph(site("stock")), ImportGraph(site("patched"))
    added = new_imports(released, patched)
    assert len(added) > 5
    circles = {f"{name} -> {target}": patched.way(target, name) for name, target in added}
    assert {hook: way for hook, way in circles.items() if way is not None} == {}


@pytest.mark.parametrize(
    ("hook", "overlay", "circle"),
    [
        ("import vllm.new", "from vllm import upstream", True),
        ("import vllm.new", "from .upstream import name", True),
        ("import vllm.new", "if FLAG:\n    import vllm.upstream", True),
        ("import vllm.new", "class A:\n    import vllm.upstream", True),
        ("import vllm.new", "def f():\n    import vllm.upstream", False),
        ("import vllm.new", "if TYPE_CHECKING:\n    import vllm.upstream", False),
        ("def f():\n    import vllm.new", "import vllm.upstream", False),
    ],
)
def test_what_is_a_circle(tmp_path: Path, hook: str, overlay: str, circle: bool) -> None:
    graph = ImportGraph(tmp_path)
    (tmp_path / "vllm").mkdir()
    for name, text in {"__init__": "", "upstream": hook, "new": overlay}.items():
        (tmp_path / "vllm" / f"{name}.py").write_text(text)
    found = graph.way("vllm.new", "vllm.upstream") if graph.direct("vllm.upstream") else None
    assert (found == ["vllm.new", "vllm.upstream"]) is circle


def test_a_package_counts_as_run_before_its_modules(tmp_path: Path) -> None:
    files = {
        "vllm/a/__init__.py": "import vllm.new, vllm.a.c",
        "vllm/a/c.py": "import vllm.a.b",
        "vllm/a/b.py": "",
        "vllm/new.py": "import vllm.a.b",
    }
    for name, text in {"vllm/__init__.py": "", **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    graph = ImportGraph(tmp_path)
    assert graph.way("vllm.new", "vllm.a") == ["vllm.new", "vllm.a.b", "vllm.a"]
    assert graph.way("vllm.a.b", "vllm.a") is None, "its package runs first in any case"
    assert graph.way("vllm.a.b", "vllm.a.c") is None


@pytest.mark.parametrize("module", FIRST)
def test_any_module_can_be_imported_first(module: str) -> None:
    assert run_child("apply.import_cases:import_first", module=module)["imported"] == module
