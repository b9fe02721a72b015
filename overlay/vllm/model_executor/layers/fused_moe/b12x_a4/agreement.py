# SPDX-License-Identifier: Apache-2.0
"""All ranks run the same precision for the same rows, or the server does not start.

Each rank decides from its own environment, b12x and files. On one node they are the same; with several nodes or
containers they need not be (multi-node multiprocessing copies no environment variables), and a rank that ran W4A16
where the others ran A4 would corrupt the all-reduced sums without any error. Tensor-parallel ranks have to agree in
everything; pipeline stages hold other layers, but have to agree in the rest, and in whether steps with prefill rows
bypass CUDA graphs: a stage that pads its rows for a graph cannot take rows from one that does not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm.model_executor.layers.quantization.nvfp4_csf.settings import (
    get_settings as get_csf_settings,
)

_LAYERS = "armed layers"


class RanksDisagreeError(RuntimeError):
    """Ranks made different load-time decisions; the message names the first difference."""


def describe(provider: str, armed: Sequence[str], switches: str) -> dict[str, str]:
    """What this rank decided, as one short text per topic."""
    return {
        "patch set": patch_set_id(),
        "switches": switches,
        "CSF switches": str(get_csf_settings()),
        "b12x": provider,
        _LAYERS: f"{len(armed)} ({hashlib.sha256(json.dumps(list(armed)).encode()).hexdigest()[:12]})",
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
    _compare(_gather(description, group), "tensor-parallel ranks")


def check_stages_agree(
    description: dict[str, str], has_layers: bool, is_armed: bool, group: Any = None
) -> tuple[bool, bool]:
    """Compare *description*, its layers aside, with the other pipeline stages.

    Returns:
        Whether any stage has layers that could be armed, and whether any stage has armed ones.

    Raises:
        RanksDisagreeError: on every rank, when two stages differ.
    """
    if group is None:
        from vllm.distributed.parallel_state import get_pp_group

        group = get_pp_group()
    if group.world_size == 1:
        return has_layers, is_armed
    stages = _gather((description, has_layers, is_armed), group)
    common = [
        {topic: text for topic, text in stage[0].items() if topic != _LAYERS} for stage in stages
    ]
    _compare(common, "pipeline stages")
    return any(stage[1] for stage in stages), any(stage[2] for stage in stages)


def _gather(value: Any, group: Any) -> list[Any]:
    import torch

    gathered: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(gathered, value, group=group.cpu_group)
    return gathered


def _compare(descriptions: list[dict[str, str]], who: str) -> None:
    first = descriptions[0]
    for rank, other in enumerate(descriptions):
        if digest(other) != digest(first):
            raise RanksDisagreeError(_difference(first, rank, other, who))


def _difference(first: dict[str, str], rank: int, other: dict[str, str], who: str) -> str:
    for topic in first | other:
        if first.get(topic) != other.get(topic):
            return (
                f"{who} 0 and {rank} differ in {topic}: {first.get(topic)!r} and {other.get(topic)!r}; "
                "give all nodes the same environment, b12x and patched vLLM."
            )
    return f"{who} 0 and {rank} differ."


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
