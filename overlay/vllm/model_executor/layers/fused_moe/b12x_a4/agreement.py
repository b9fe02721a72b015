# SPDX-License-Identifier: Apache-2.0
"""All tensor-parallel ranks run the same precision for the same rows, or the server does not start.

Each rank decides from its own environment, b12x and files. On one node they are the same; with several nodes or
containers they need not be (multi-node multiprocessing copies no environment variables), and a rank that ran W4A16
where the others ran A4 would corrupt the all-reduced sums without any error.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_CSF_VARIABLES = ("VLLM_B12X_CSF_COMPRESS", "VLLM_B12X_CSF_SCALE_PREFETCH")


class RanksDisagreeError(RuntimeError):
    """Tensor-parallel ranks made different load-time decisions; the message names the first difference."""


def describe(provider: str, armed: Sequence[str], switches: str) -> dict[str, str]:
    """What this rank decided, as one short text per topic."""
    return {
        "patch set": patch_set_id(),
        "switches": switches,
        "CSF switches": " ".join(f"{name}={os.environ.get(name, '')}" for name in _CSF_VARIABLES),
        "b12x": provider,
        "armed layers": f"{len(armed)} ({hashlib.sha256(json.dumps(list(armed)).encode()).hexdigest()[:12]})",
    }


def digest(description: dict[str, str]) -> str:
    """sha256 over a rank's description."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def check_ranks_agree(description: dict[str, str], group: Any = None) -> None:
    """Compare *description* with every rank of the tensor-parallel group, over its CPU group.

    Raises:
        RanksDisagreeError: on every rank, when two ranks differ.
    """
    if group is None:
        from vllm.distributed.parallel_state import get_tp_group

        group = get_tp_group()
    if group.world_size == 1:
        return
    import torch

    gathered: list[dict[str, str] | None] = [None] * group.world_size
    torch.distributed.all_gather_object(gathered, description, group=group.cpu_group)
    for rank, other in enumerate(gathered):
        if digest(other or {}) != digest(gathered[0] or {}):
            raise RanksDisagreeError(_difference(gathered[0] or {}, rank, other or {}))


def _difference(first: dict[str, str], rank: int, other: dict[str, str]) -> str:
    for topic in first | other:
        if first.get(topic) != other.get(topic):
            return (
                f"tensor-parallel ranks 0 and {rank} differ in {topic}: {first.get(topic)!r} and {other.get(topic)!r}; "
                "give all nodes the same environment, b12x and patched vLLM."
            )
    return f"tensor-parallel ranks 0 and {rank} differ."


def patch_set_id() -> str:
    """Identity of the patch set in this vLLM: the one ``scripts/apply-patches`` wrote, else a digest of this package."""
    try:
        from vllm.b12x_patchset import PATCHSET_ID
    except ImportError:
        content = hashlib.sha256()
        for source in sorted(Path(__file__).resolve().parent.glob("*.py")):
            content.update(source.name.encode() + b"\0" + source.read_bytes())
        return f"unmarked files {content.hexdigest()[:12]}"
    return str(PATCHSET_ID)
