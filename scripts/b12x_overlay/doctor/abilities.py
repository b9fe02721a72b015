# SPDX-License-Identifier: Apache-2.0
"""What a b12x can do, read from its source: an import of the real API takes seconds and needs torch and CUDA.

Abilities are looked for, not inferred from a version. Each is the presence of the very name or parameter that this
project uses.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

_PLANNER = "plan_b12x_fp4_moe_weights"
"""The function that ``fused_moe.plan_weights`` hands ``quant_modes`` to, in both providers."""

_TOP_LEVEL = re.compile(r"^(?=[A-Za-z_@])", re.MULTILINE)


@dataclass(frozen=True)
class Abilities:
    """What was found.

    Attributes:
        fused_moe: ``b12x.moe.fused_moe`` with ``Caps``, ``plan_weights``, ``prepare_weights``, ``bind`` and ``run``.
        dual_plan: the weight planner behind ``plan_weights(quant_modes=...)`` takes several modes and a
            ``w13_layout``: one copy of the weights for NVFP4 and W4A16.
        a4_prefill: ``TPMoEScratchPlan.bind`` takes ``a4_prefill`` (later b12x builds).
        csf: ``expand_scales`` and ``Nvfp4CsfWeights``.
    """

    fused_moe: bool = False
    dual_plan: bool = False
    a4_prefill: bool = False
    csf: bool = False


def probe(root: Path) -> Abilities:
    """Read the abilities of the b12x whose package folder is *root*."""
    folder = root / "moe" / "fused_moe"
    entry_points = _entry_points(_read(folder / "__init__.py"))
    implementation = _read(folder / "_impl.py")
    needed = {"Caps", "plan", "plan_weights", "prepare_weights", "bind", "run"}
    plan_weights = _parameters(_block(implementation, f"def {_PLANNER}"), _PLANNER)
    bind = _parameters(_block(implementation, "class TPMoEScratchPlan"), "bind")
    return Abilities(
        fused_moe=needed <= entry_points,
        dual_plan={"quant_modes", "w13_layout"} <= plan_weights and needed <= entry_points,
        a4_prefill="a4_prefill" in bind,
        csf={"expand_scales", "Nvfp4CsfWeights"} <= entry_points,
    )


def _entry_points(source: str) -> set[str]:
    """The strings of ``META = OpMeta(entry_points=(...))``."""
    for node in ast.walk(_parse(source)):
        if isinstance(node, ast.keyword) and node.arg == "entry_points":
            constants = [
                item.value for item in ast.walk(node.value) if isinstance(item, ast.Constant)
            ]
            return {value for value in constants if isinstance(value, str)}
    return set()


def _block(source: str, start: str) -> str:
    """The top-level statement that begins with *start*: parsing the whole 500 kB file would take a second."""
    begin = re.search(rf"^{re.escape(start)}\b", source, re.MULTILINE)
    if begin is None:
        return ""
    # The closing line of a signature (") -> Plan:") is not indented either, but starts with no letter.
    end = _TOP_LEVEL.search(source, begin.end())
    return source[begin.start() : end.start() if end else None]


def _parameters(source: str, function: str) -> set[str]:
    for node in ast.walk(_parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            arguments = node.args
            return {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    return set()


def _parse(source: str) -> ast.AST:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
