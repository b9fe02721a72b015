# SPDX-License-Identifier: Apache-2.0
"""Ranks of one group as processes of their own that exchange over gloo, for ``run_child``.

vLLM is imported once; the ranks are forked from there.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from typing import Any


def scenarios(cases: list[dict[str, Any]]) -> list[list[str]]:
    """The error of each rank of each case, or what it dispatches: ``"a4"``, ``"w4a16"``.

    A case has a list ``environments`` (one per rank) and one ``calibrated`` (per rank, per layer: whether the
    checkpoint brings input scales); its ranks are pipeline stages if it has ``stages``, else tensor-parallel.
    """
    from support import reference_b12x, sm120

    sm120.install()
    reference_b12x.install()
    context = multiprocessing.get_context("fork")
    results = []
    for case in cases:
        folder = tempfile.mkdtemp()
        of = len(case["environments"])
        queue = context.Queue()
        ranks = [
            context.Process(
                target=_rank,
                args=(
                    queue,
                    number,
                    of,
                    folder,
                    case["environments"][number],
                    case["calibrated"][number],
                    "_PP" if case.get("stages") else "_TP",
                ),
            )
            for number in range(of)
        ]
        for rank in ranks:
            rank.start()
        errors = dict(queue.get(timeout=120) for _ in ranks)
        for rank in ranks:
            rank.join()
        results.append([errors[number] for number in range(of)])
    return results


def _rank(
    queue: Any,
    number: int,
    of: int,
    folder: str,
    environment: dict[str, str],
    calibrated: list[bool],
    group_name: str,
) -> None:
    import torch
    import vllm.distributed.parallel_state as parallel_state
    from support.moe_layer import make_layer
    from vllm.v1.worker.moe_row_types import RowTyper

    from rows import harness

    os.environ.update(environment)
    torch.set_num_threads(1)
    layers = []
    for index, good in enumerate(calibrated):
        layer = make_layer("NVFP4", harness.SMALL, prefix=f"model.layers.{index}.mlp.experts")
        harness.fill(layer, index, good)
        layers.append(layer)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", world_size=of, rank=number
    )
    group = getattr(parallel_state, group_name)
    group.world_size, group.cpu_group = of, torch.distributed.group.WORLD
    try:
        harness.start(*layers)
        queue.put((number, "a4" if RowTyper.runs_a4 else "w4a16"))
    except Exception as error:
        queue.put((number, f"{type(error).__name__}: {error}"))
