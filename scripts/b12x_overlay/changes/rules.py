# SPDX-License-Identifier: Apache-2.0
"""What the fragments of a folder owe each other and the patch set: names, references, no cycles."""

from __future__ import annotations

import difflib
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from b12x_overlay.changes.model import Fault, Fragment, plain


def name_faults(fragments: Sequence[Fragment], component: str) -> Iterator[Fault]:
    """Ids that do not equal the file's name, are there twice, or belong to another component."""
    files = defaultdict(list)
    for fragment in fragments:
        if fragment.id:
            files[fragment.id].append(fragment.file)
    for fragment in fragments:
        own = fragment.id
        if not own:
            continue  # missing or no text: the schema's fault
        if own != fragment.stem:
            fix = f'rename the file to {plain(own)}.json or write "id": "{fragment.stem}"'
            yield Fault(
                fragment.file,
                "$.id",
                f'is "{plain(own)}", the file is {fragment.file}',
                fix,
                "id-file",
            )
        others = [file for file in files[own] if file != fragment.file]
        if others:
            fix = "give each change an id of its own"
            yield Fault(
                fragment.file, "$.id", f"is also the id of {', '.join(others)}", fix, "duplicate-id"
            )
        if not own.startswith(f"{component}-"):
            yield Fault(
                fragment.file, "$.id", f'"{plain(own)}" does not start with {component}-',
                f"name it {component}-…, or name the folder's component with --component", "component",
            )  # fmt: skip


def author_faults(fragments: Sequence[Fragment]) -> Iterator[Fault]:
    """The same handle in two spellings of its letters (GitHub does not tell them apart)."""
    for fragment in fragments:
        seen: dict[str, str] = {}
        for index, author in enumerate(fragment.texts("authors")):
            first = seen.setdefault(author.lstrip("@").lower(), author)
            if first != author:
                what = f'"{plain(author)}" and "{plain(first)}" are one account'
                yield Fault(
                    fragment.file, f"$.authors[{index}]", what, "keep one of them", "duplicate"
                )


def requirement_faults(fragments: Sequence[Fragment], component: str) -> Iterator[Fault]:
    """``requires`` of the own component that resolve nowhere, and cycles."""
    known = {fragment.id for fragment in fragments if fragment.id}
    for fragment in fragments:
        for index, wanted in _requirements(fragment):
            if wanted in known or not wanted.startswith(f"{component}-"):
                continue
            close = difflib.get_close_matches(wanted, known - {fragment.id}, 1)
            fix = f'write "{close[0]}"' if close else "remove it or add that fragment"
            what = f'"{plain(wanted)}" is no fragment of this folder'
            yield Fault(fragment.file, f"$.requires[{index}]", what, fix, "requires")
    for cycle in _cycles(
        {fragment.id: fragment.texts("requires") for fragment in fragments if fragment.id}
    ):
        file = next(fragment.file for fragment in fragments if fragment.id == cycle[0])
        what = "requires itself: " + " -> ".join(plain(step) for step in [*cycle, cycle[0]])
        yield Fault(file, "$.requires", what, "take one of these references out", "cycle")


def external_requirements(fragments: Sequence[Fragment], component: str) -> dict[str, list[str]]:
    """Ids of other components, each with the fragments that require it; nobody here can resolve them."""
    found = defaultdict(list)
    for fragment in fragments:
        for _, wanted in _requirements(fragment):
            if not wanted.startswith(f"{component}-"):
                found[wanted].append(fragment.stem)
    return dict(sorted(found.items()))


def patchset_fragments(path: Path) -> dict[str, list[str]]:
    """Each patch of the patch set with the ids of its fragments.

    Reads these two keys only, so that fragments can be checked while the patches themselves are not in order.

    Raises:
        ValueError: *path* is no patch set file; the message says why.
        OSError: it cannot be read.
    """
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    result: dict[str, list[str]] = {}
    patches = document.get("patch", [] if "pin" in document else None)
    if not isinstance(patches, list):
        raise ValueError("is no patch set: wanted an array of tables [[patch]]")
    for number, patch in enumerate(patches, 1):
        name, ids = (
            (patch.get("name"), patch.get("fragments", []))
            if isinstance(patch, dict)
            else (None, None)
        )
        if (
            not isinstance(name, str)
            or not isinstance(ids, list)
            or not all(isinstance(one, str) for one in ids)
        ):
            raise ValueError(
                f"[[patch]] number {number} needs a name (text) and fragments (list of texts); found {patch!r:.200}"
            )
        result[name] = ids
    return result


def patchset_faults(
    file: str, patches: Mapping[str, Sequence[str]], stems: set[str]
) -> Iterator[Fault]:
    """Patches that name no fragment, and named fragments that are not there."""
    for patch, ids in patches.items():
        if not ids:
            what = "names no fragment"
            yield Fault(
                file,
                patch,
                what,
                "write one with scripts/changes new and name it there",
                "patch-fragments",
            )
        for wanted in ids:
            if wanted not in stems:
                close = difflib.get_close_matches(wanted, stems, 1)
                fix = f"write it with scripts/changes new --id {wanted}" + (
                    f", or name {close[0]}" if close else ""
                )
                yield Fault(
                    file,
                    patch,
                    f"names the fragment {wanted}, which is missing",
                    fix,
                    "patch-fragments",
                )


def _requirements(fragment: Fragment) -> list[tuple[int, str]]:
    found = fragment.value.get("requires")
    if not isinstance(found, list):
        return []
    return [(index, item) for index, item in enumerate(found) if isinstance(item, str)]


def _cycles(graph: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Each cycle once, starting at its smallest id (depth-first, without recursion: chains may be long)."""
    done: set[str] = set()
    cycles: dict[tuple[str, ...], list[str]] = {}
    for root in sorted(graph):
        path: list[str] = []
        stack: list[tuple[str, Iterator[str]]] = []
        if root not in done:
            path.append(root)
            stack.append((root, iter(graph[root])))
        while stack:
            node, following = stack[-1]
            step = next(following, None)
            if step is None:
                stack.pop()
                path.pop()
                done.add(node)
            elif step in path:
                cycle = path[path.index(step) :]
                start = cycle.index(min(cycle))
                cycle = cycle[start:] + cycle[:start]
                cycles[tuple(cycle)] = cycle
            elif step in graph and step not in done:
                path.append(step)
                stack.append((step, iter(graph[step])))
    return [cycles[key] for key in sorted(cycles)]
