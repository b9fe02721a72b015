# SPDX-License-Identifier: Apache-2.0
"""Weight reloads of CSF layers: into the first load's planes, or refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from csf.method_support import MODES, WAYS, loaded, run
from support.alive import distinct_tensors


def reload(csf: Any, layer: Any, tensors: Any) -> None:
    """vLLM's layerwise reload of one layer."""
    from vllm.model_executor.model_loader.reload.layerwise import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    initialize_layerwise_reload(layer)
    csf.layers.load(layer, tensors, process=False)
    finalize_layerwise_reload(layer, SimpleNamespace(dtype=torch.bfloat16))


@WAYS
@MODES
def test_reload_keeps_every_address(csf, way: str, armed: bool) -> None:
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

    csf.arm(armed)
    make = csf.layers.make_streams if way == "streams" else csf.layers.make_compressing
    pack = csf.layers.as_streams if way == "streams" else dict
    layer = make(0)
    record_metadata_for_reloading(layer)
    csf.layers.load(layer, pack(csf.layers.checkpoint_tensors(seed=0)), process=way == "streams")
    old = run(csf, layer, prefill=armed)

    def addresses() -> list[int]:
        prepared = csf.harness.experts_of(layer)._prepared_experts
        planes = layer.nvfp4_csf.planes
        tensors = [t for p in planes for t in (p.fixed, p.exceptions, p.offsets)]
        tensors += [
            *layer.nvfp4_csf.scratch,
            prepared.w1_fp4,
            prepared.w2_fp4,
            prepared.w1_blockscale,
        ]
        return [t.data_ptr() for t in tensors]

    before = addresses()
    prepared = csf.harness.experts_of(layer)._prepared_experts
    sizes = {t.numel() for t in (prepared.w1_fp4, prepared.w2_fp4, *layer.nvfp4_csf.scratch)}
    sizes |= {planes.fixed.numel() for planes in layer.nvfp4_csf.planes}
    del prepared
    held = distinct_tensors(sizes)
    for _ in range(2):  # the second reload meets what the first left
        reload(csf, layer, pack(csf.layers.checkpoint_tensors(seed=5)))
        assert addresses() == before
        assert distinct_tensors(sizes) == held, "a copy of the new weights stayed"
    new = run(csf, layer, prefill=armed)
    csf.owner._open.clear()
    with csf.owner.owner_scope():
        fresh = loaded(csf, way, 1, tensors=csf.layers.checkpoint_tensors(seed=5))
    csf.owner._open.append(csf.scope)
    assert torch.equal(new, run(csf, fresh, prefill=armed))
    assert not torch.equal(new, old)


@WAYS
def test_a_reload_that_does_not_fit_is_refused_by_name(csf, way: str) -> None:
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

    make = csf.layers.make_streams if way == "streams" else csf.layers.make_compressing
    pack = csf.layers.as_streams if way == "streams" else dict
    layer = make(0)
    record_metadata_for_reloading(layer)
    csf.layers.load(layer, pack(csf.layers.checkpoint_tensors()), process=way == "streams")
    expanded = [p.exceptions.clone() for p in layer.nvfp4_csf.planes]
    wild = csf.layers.checkpoint_tensors(seed=3)
    generator = torch.Generator().manual_seed(0)
    for key, tensor in wild.items():
        if key[2] == "weight_scale":
            noise = torch.randint(0, 126, tensor.shape, generator=generator).byte()
            wild[key] = noise.view(torch.float8_e4m3fn)
    with pytest.raises(
        RuntimeError,
        match=r"layers\.0\.mlp\.experts: the reloaded scales need .* restart the server",
    ):
        reload(csf, layer, pack(wild))
    assert all(
        torch.equal(a, p.exceptions) for a, p in zip(expanded, layer.nvfp4_csf.planes, strict=True)
    )
