# SPDX-License-Identifier: Apache-2.0
"""All checks of a fragment folder in one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from b12x_overlay.changes import rules
from b12x_overlay.changes.model import Entry, Fault, Fragment
from b12x_overlay.changes.reading import parse_entries
from b12x_overlay.changes.receipts import Receipt, published_faults
from b12x_overlay.changes.schema import schema_faults


@dataclass
class Report:
    """What a check found. *settled* are faults of published fragments: too late to correct, so they do not fail."""

    fragments: list[Fragment]
    faults: list[Fault]
    settled: list[Fault] = field(default_factory=list)
    external: dict[str, list[str]] = field(default_factory=dict)


def check_entries(
    entries: Sequence[Entry],
    component: str,
    *,
    patches: tuple[str, Mapping[str, Sequence[str]]] | None = None,
    receipt: Receipt | None = None,
    old_bytes: Callable[[str], bytes | None] = lambda blob: None,
) -> Report:
    """Check everything in a folder.

    Args:
        entries: what lies in the folder.
        component: the component its ids start with.
        patches: the patch set's file name and the fragment ids of each patch, where there is a patch set.
        receipt: the last release's receipt, where there is one.
        old_bytes: gives a published blob's bytes by id.
    """
    fragments, faults = parse_entries(list(entries))
    for fragment in fragments:
        faults += schema_faults(fragment)
    faults += rules.name_faults(fragments, component)
    faults += rules.author_faults(fragments)
    faults += rules.requirement_faults(fragments, component)
    if patches is not None:
        faults += rules.patchset_faults(*patches, {fragment.stem for fragment in fragments})
    settled: list[Fault] = []
    if receipt is not None:
        published = {
            fragment.file
            for fragment in fragments
            if receipt.fragments.get(fragment.stem) == fragment.blob
        }
        settled = [fault for fault in faults if fault.file in published]
        faults = [fault for fault in faults if fault.file not in published]
        faults += published_faults(list(entries), receipt, component, old_bytes)
    return Report(
        fragments,
        sorted(faults),
        sorted(settled),
        rules.external_requirements(fragments, component),
    )
