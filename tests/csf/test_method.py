# SPDX-License-Identifier: Apache-2.0
"""CSF layers in vLLM: one shared scratch that both modes really read, whoever compresses; what is reported."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from csf.method_support import MODES, WAYS, loaded, ordinary, run, scratch_addresses
from nvfp4_csf.sizes import readable


@WAYS
@MODES
def test_prepared_experts_read_the_scratch(csf, way: str, armed: bool) -> None:
    """A W4A16-only plan would hold a copy: the same addresses, and new scratch contents must change the output."""
    csf.arm(armed)
    layer = loaded(csf, way)
    experts = csf.harness.experts_of(layer)
    assert type(experts).__name__ == "DualPlanExperts"
    assert (layer.b12x_dual_plan.scales is not None) == armed
    prepared = experts._prepared_experts
    assert [
        prepared.w1_blockscale.data_ptr(),
        prepared.w2_blockscale.data_ptr(),
    ] == scratch_addresses(layer)
    assert [
        layer.w13_weight_scale.data_ptr(),
        layer.w2_weight_scale.data_ptr(),
    ] == scratch_addresses(layer)

    before = run(csf, layer, prefill=armed)
    assert csf.b12x.launches[-1].quant_mode == ("nvfp4" if armed else "w4a16")
    layer.nvfp4_csf.before = lambda *_: None  # leave the scratch as this test makes it
    assert torch.equal(run(csf, layer, prefill=armed), before)
    for tensor in layer.nvfp4_csf.scratch:
        tensor.view(torch.uint8).add_(8)  # E4M3: every scale doubles
    after = run(csf, layer, prefill=armed)
    assert before.abs().max() > 0
    assert not torch.equal(after, before)
    assert after.float().abs().mean() > 2 * before.float().abs().mean()


@WAYS
@MODES
def test_layers_over_one_scratch_give_what_plain_scales_give(
    csf, monkeypatch, way: str, armed: bool
) -> None:
    csf.arm(armed)
    layers = [loaded(csf, way, number) for number in range(2)]
    assert scratch_addresses(layers[0]) == scratch_addresses(layers[1])
    plain = [ordinary(csf, monkeypatch, number) for number in range(2)]
    for turn in range(3):
        for mine, theirs in zip(layers, plain, strict=True):
            for prefill in (False, True):
                assert torch.equal(
                    run(csf, mine, prefill, seed=turn),
                    run(csf, theirs, prefill and armed, seed=turn),
                ) or (armed and not prefill)
    if armed:
        modes = {launch.quant_mode for launch in csf.b12x.launches}
        assert modes == {"nvfp4", "w4a16"}


def test_packed_weights_are_not_kept_beside_compressed_scales(csf, monkeypatch) -> None:
    """They would copy plain scales; the layer must not keep them because the switch is on."""
    from vllm.model_executor.layers.fused_moe.b12x_a4 import settings

    monkeypatch.setenv(settings.KEEP_PACKED, "1")
    csf.arm(True)
    layer = loaded(csf, "compress")
    assert layer.b12x_dual_plan.scales is not None
    assert not layer.b12x_dual_plan.keep_packed
    assert csf.harness.experts_of(layer)._packed_experts is None


@WAYS
def test_one_expansion_per_call_whatever_its_parts(csf, way: str) -> None:
    csf.arm(True)
    layer = loaded(csf, way)
    counted = []
    expansion = layer.nvfp4_csf.expansion
    layer.nvfp4_csf._expansion = SimpleNamespace(
        experts=expansion.experts,
        expand=lambda stream=None: (counted.append("all"), expansion.expand()),
        expand_routed=lambda ids: (counted.append(tuple(ids.shape)), expansion.expand_routed(ids)),
    )
    launches = len(csf.b12x.launches)
    with csf.harness.step(3, [(1, 2)]):
        csf.harness.call(layer, csf.harness.make_batch(3, csf.layers.SMALL))
    assert len(csf.b12x.launches) - launches == 2  # two decode rows gathered, one prefill row
    assert counted == [(3, 2)]
    with csf.harness.step(40, [(10, 30)]):
        csf.harness.call(layer, csf.harness.make_batch(40, csf.layers.SMALL))
    assert counted == [(3, 2), "all"]


def test_plain_scales_never_all_exist_at_once(csf, monkeypatch) -> None:
    """Compressing four layers tensor by tensor: at no time are there real plain scales of two of them."""
    import weakref

    from vllm.model_executor.layers.quantization.nvfp4_csf import method
    from vllm.model_executor.model_loader.reload import meta

    alive: list[weakref.ref] = []
    most = [0]
    materialize = meta.materialize_meta_tensor

    def watched(tensor: torch.Tensor) -> torch.Tensor:
        made = materialize(tensor)
        if made.dtype == torch.float8_e4m3fn:
            alive.append(weakref.ref(made))
            most[0] = max(most[0], sum(ref() is not None for ref in alive))
        return made

    monkeypatch.setattr(meta, "materialize_meta_tensor", watched)
    monkeypatch.setattr(method, "materialize_meta_tensor", watched)
    layers = [csf.layers.make_compressing(number) for number in range(4)]
    for layer in layers:
        assert layer.w13_weight_scale.is_meta and layer.w2_weight_scale.is_meta
    for number, layer in enumerate(layers):
        csf.layers.load(layer, csf.layers.checkpoint_tensors(seed=number), process=False)
        assert layer.nvfp4_csf.is_ready
    assert most[0] == 2  # w13's and w2's of one layer
    assert all(ref() is None for ref in alive)


def test_weight_only_checkpoints_do_not_wait_for_input_scales(csf) -> None:
    tensors = csf.layers.checkpoint_tensors(input_scale=False)
    layer = csf.layers.load(csf.layers.make_compressing(algo="W4A16_NVFP4"), tensors, process=False)
    assert layer.nvfp4_csf.is_ready
    assert layer.b12x_dual_plan.scales is None
    assert layer.w13_input_scale.tolist() == [[0.0, 0.0]] * 4


@WAYS
def test_draft_and_target_share_nothing(csf, way: str) -> None:
    target = loaded(csf, way, 0)
    csf.owner._open.clear()  # the target's initialize_model has returned
    with csf.owner.owner_scope() as draft_scope:
        draft = loaded(csf, way, 1)
    assert draft.nvfp4_csf.owner is draft_scope is not target.nvfp4_csf.owner
    assert not set(scratch_addresses(draft)) & set(scratch_addresses(target))
    csf.owner._open.append(csf.scope)


def test_a_draft_model_is_not_compressed_at_load(csf) -> None:
    """Its few layers would save less than a scratch of their own takes."""
    csf.owner._open.clear()
    with csf.owner.owner_scope(is_draft=True):
        layer = csf.layers.make_compressing()
        assert type(layer.quant_method).__name__ == "ModelOptNvFp4FusedMoE"
        assert csf.layers.make_streams().nvfp4_csf.owner.is_draft
    csf.owner._open.append(csf.scope)


@pytest.mark.parametrize(("intermediate", "ranks"), [(128, 1), (128, 2), (288, 3), (384, 8)])
def test_every_rank_computes_what_it_computes_from_plain_scales(
    csf, monkeypatch, intermediate, ranks
) -> None:
    """288 over 3 ranks is 96 each, padded to 128; 384 over 8 is 48 each, which cuts pairs of nibbles."""
    from dataclasses import replace

    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig

    geometry = replace(csf.layers.SMALL, I=intermediate)
    tensors = csf.layers.checkpoint_tensors(geometry)
    for rank in {0, ranks // 2, ranks - 1}:
        parallel = replace(FusedMoEParallelConfig.make_no_parallel(), tp_size=ranks, tp_rank=rank)
        more = {"geometry": geometry, "moe": {"moe_parallel_config": parallel}}
        monkeypatch.setenv("VLLM_B12X_CSF_COMPRESS", "1")
        forget_settings()
        layers = [
            csf.layers.load(csf.layers.make_streams(**more), csf.layers.as_streams(tensors)),
            csf.layers.load(csf.layers.make_compressing(**more), tensors, process=False),
        ]
        monkeypatch.setenv("VLLM_B12X_CSF_COMPRESS", "0")
        forget_settings()
        plain = csf.layers.load(csf.layers.make_ordinary(**more), tensors)
        assert type(plain.quant_method).__name__ == "ModelOptNvFp4FusedMoE"
        wanted = run(csf, plain, prefill=False)
        for layer in layers:
            layer.nvfp4_csf.owner._scales = None  # this scope goes on growing
            assert torch.equal(run(csf, layer, prefill=False), wanted)


def forget_settings() -> None:
    from vllm.model_executor.layers.quantization.nvfp4_csf import settings

    settings.get_settings.cache_clear()


def test_layers_outside_a_model_are_refused(csf) -> None:
    csf.owner._open.clear()
    with pytest.raises(RuntimeError, match="inside initialize_model"):
        csf.layers.make_streams()
    csf.owner._open.append(csf.scope)


def test_nested_models_share_the_outer_owner(csf) -> None:
    with csf.owner.owner_scope() as inner:
        assert inner is csf.scope
    assert csf.owner.current_owner() is csf.scope


@WAYS
def test_sizes_are_reported_when_the_last_layer_is_ready(csf, monkeypatch, way: str) -> None:
    said = []
    monkeypatch.setattr(csf.owner.logger, "info", lambda text, *a: said.append(text % a))
    if way == "streams":
        layers = [csf.layers.make_streams(n) for n in range(2)]
    else:
        layers = [csf.layers.make_compressing(n) for n in range(2)]
    for number in (1, 0):  # any order of arrival
        assert not any("NVFP4-CSF" in line for line in said)
        tensors = csf.layers.checkpoint_tensors(seed=number)
        if way == "streams":
            csf.layers.load(layers[number], csf.layers.as_streams(tensors))
        else:
            csf.layers.load(layers[number], tensors, process=False)
    line = next(line for line in said if "NVFP4-CSF" in line)
    plain = 2 * 4 * (2 * 64 * 8 + 128 * 4)
    compressed = sum(p.nbytes for layer in layers for p in layer.nvfp4_csf.planes)
    assert f"2 MoE layers on this rank: {plain} bytes plain, {compressed} bytes compressed" in line
    assert f"{plain // 2} bytes of shared scratch" in line
    saved = plain - compressed - plain // 2
    assert saved < 0  # two layers do not pay for the scratch
    more = f"the scratch outweighs the saving: {readable(-saved)} more than plain scales take"
    assert line.endswith(more)


def test_the_report_says_what_is_saved(csf) -> None:
    owner = csf.owner.CsfOwner()
    owner.layers = [SimpleNamespace(plain_bytes=4000, nbytes=2100) for _ in range(2)]
    assert owner.report().endswith("; 3.800 KB saved")
    owner.layers = [SimpleNamespace(plain_bytes=4000, nbytes=4000)]
    assert owner.report().endswith("; 0 B saved")
