# SPDX-License-Identifier: Apache-2.0
"""Which modules of a vLLM tree run which others when they are imported, from their sources.

Only what runs at import counts: imports inside functions and under ``TYPE_CHECKING`` do not, both branches of any other
``if`` and of ``try`` do. Importing ``a.b.c`` runs ``a`` and ``a.b`` first.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True)
class Module:
    name: str
    path: Path

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


class ImportGraph:
    """The modules below ``root/vllm``."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._direct: dict[str, frozenset[str]] = {}

    @cached_property
    def modules(self) -> dict[str, Module]:
        found = {}
        for path in (self._root / "vllm").rglob("*.py"):
            parts = path.relative_to(self._root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = Module(name, path)
        return found

    def direct(self, name: str) -> frozenset[str]:
        """Modules that the import statements of *name* name, without their parent packages."""
        if name not in self._direct:
            module = self.modules[name]
            tree = ast.parse(module.path.read_text(encoding="utf-8"))
            self._direct[name] = frozenset(self._targets(module, tree))
        return self._direct[name]

    def _targets(self, module: Module, tree: ast.AST) -> Iterator[str]:
        for statement in _run_at_import(tree):
            if isinstance(statement, ast.Import):
                yield from (a.name for a in statement.names if a.name in self.modules)
                continue
            base = statement.module or ""
            if statement.level:
                up = statement.level - module.is_package
                package = module.name.split(".")[: len(module.name.split(".")) - up]
                base = ".".join([*package, *filter(None, [base])])
            for alias in statement.names:
                inner = f"{base}.{alias.name}"
                if inner in self.modules:
                    yield inner
                elif base in self.modules:
                    yield base

    def way(self, start: str, goal: str) -> list[str] | None:
        """The modules from *start* to *goal* in the order in which they import each other; None: none.

        Packages that *start* lies in and *goal* lies in or is do not count: whoever imports *start* has run them before.
        """
        common = set(_parents(start)) & {*_parents(goal), goal}
        came_from: dict[str, str | None] = {start: None}
        queue = [start]
        for name in queue:
            parents = (set(_parents(name)) & self.modules.keys()) - common
            for target in sorted(self.direct(name) | parents):
                if target not in came_from:
                    came_from[target] = name
                    queue.append(target)
                if target == goal:
                    return [*_back(came_from, name), goal]
        return None


def _run_at_import(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for statement in child.orelse:
                yield from _run_at_import(ast.Module([statement], []))
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.expr):
            yield from _run_at_import(child)


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def _back(came_from: dict[str, str | None], name: str | None) -> list[str]:
    steps: list[str] = []
    while name is not None:
        steps.insert(0, name)
        name = came_from[name]
    return steps
