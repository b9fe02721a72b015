# SPDX-License-Identifier: Apache-2.0
"""CSF layers in vLLM: one shared scratch that both modes really read, reloads in place, errors and refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from csf.streams import plausible_scales
from nvfp4_csf import codec
from nvfp4_csf.sizes import readable
from support.alive import distinct_tensors

WAYS = pytest.mark.parametrize("way", ["compress", "streams"])
MODES = pytest.mark.parametrize("armed", [False, True], ids=["w4a16", "a4"])


@pytest.fixture
def csf(vllm, monkeypatch):
    """Helpers, the reference b12x, W4A16 forced, compression on, and an inventory that names every layer."""
    monkeypatch.setenv("VLLM_B12X_MOE_FP4_FORCE_A16", "1")
    monkeypatch.setenv("VLLM_B12X_CSF_COMPRESS", "1")
    import vllm.utils.b12x as accessors
    from csf import layers
    from rows import harness
    from support import reference_b12x
    from vllm.model_executor.layers.fused_moe.b12x_a4 import plans, provider
    from vllm.model_executor.layers.fused_moe.b12x_a4 import settings as a4_settings
    from vllm.model_executor.layers.quantization.nvfp4_csf import inventory, owner, settings
    from vllm.v1.worker.moe_row_types import RowTyper

    monkeypatch.setattr(RowTyper, "armed", False)
    everything = SimpleNamespace(layers=frozenset((False, n) for n in range(8)))
    monkeypatch.setattr(inventory, "take_inventory", lambda checkpoint: everything)
    real = accessors._B12X_SUBMODULES["b12x.moe.fused_moe"]
    tools = SimpleNamespace(
        layers=layers,
        harness=harness,
        owner=owner,
        b12x=reference_b12x.install(),
        inventory=everything,
    )

    def arm(on: bool) -> None:
        monkeypatch.setenv("B12X_W4A16_A4_PREFILL_MIN_TOKENS", "1" if on else "0")
        a4_settings.get_settings.cache_clear()

    tools.arm = arm
    arm(False)
    settings.get_settings.cache_clear()
    with owner.owner_scope() as tools.scope:
        yield tools
    accessors._B12X_SUBMODULES["b12x.moe.fused_moe"] = real
    provider.get_provider.cache_clear()
    plans._shared.clear()
    monkeypatch.undo()
    settings.get_settings.cache_clear()
    a4_settings.get_settings.cache_clear()


def loaded(csf: Any, way: str, number: int = 0, tensors: Any = None, **more: Any) -> Any:
    """A CSF layer with the weights of seed *number*."""
    tensors = csf.layers.checkpoint_tensors(seed=number) if tensors is None else tensors
    if way == "streams":
        return csf.layers.load(
            csf.layers.make_streams(number, **more), csf.layers.as_streams(tensors)
        )
    return csf.layers.load(csf.layers.make_compressing(number, **more), tensors, process=False)


def ordinary(csf: Any, monkeypatch: Any, number: int = 0) -> Any:
    """The same layer from plain scales with upstream's method."""
    from vllm.model_executor.layers.quantization.nvfp4_csf import settings

    monkeypatch.setenv("VLLM_B12X_CSF_COMPRESS", "0")
    settings.get_settings.cache_clear()
    layer = csf.layers.load(
        csf.layers.make_ordinary(number), csf.layers.checkpoint_tensors(seed=number)
    )
    assert type(layer.quant_method).__name__ == "ModelOptNvFp4FusedMoE"
    return layer


def run(csf: Any, layer: Any, prefill: bool, seed: int = 0, rows: int = 24) -> torch.Tensor:
    ranges = [(0, rows)] if prefill else []
    with csf.harness.step(rows, ranges):
        return csf.harness.call(layer, csf.harness.make_batch(rows, csf.layers.SMALL, seed))


def scratch_addresses(layer: Any) -> list[int]:
    return [tensor.data_ptr() for tensor in layer.nvfp4_csf.scratch]


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


# Reload ------------------------------------------------------------------------------------------------------------


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


# Errors ------------------------------------------------------------------------------------------------------------


def test_missing_streams_are_named(csf) -> None:
    tensors = csf.layers.as_streams(csf.layers.checkpoint_tensors())
    del tensors[2, "w3", "weight_scale"]
    with pytest.raises(
        ValueError,
        match=r"layers\.0\.mlp\.experts: missing CSF tensors: .* 1 projections .* first expert/shard 2/w3",
    ):
        csf.layers.load(csf.layers.make_streams(), tensors)


def test_a_second_tensor_for_one_place_is_refused(csf) -> None:
    layer = csf.layers.make_streams()
    tensors = csf.layers.as_streams(csf.layers.checkpoint_tensors())
    csf.layers.load(layer, tensors, process=False)
    again = {(1, "w2", "weight_scale"): tensors[1, "w2", "weight_scale"].clone()}
    with pytest.raises(ValueError, match="w2_weight_scale: given twice for expert 1"):
        csf.layers.load(layer, again, process=False)


def test_plain_scales_do_not_reach_a_compressed_layer(csf) -> None:
    with pytest.raises(ValueError, match="reached a layer whose scales are compressed"):
        csf.layers.load(csf.layers.make_streams(), csf.layers.checkpoint_tensors())


@WAYS
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("shard", ["w1", "w2"])
def test_bad_global_scales_are_named(csf, way: str, value: float, shard: str) -> None:
    tensors = csf.layers.checkpoint_tensors()
    tensors[3, shard, "weight_scale_2"] = torch.tensor(value)
    name = "w2_weight_scale_2" if shard == "w2" else "w13_weight_scale_2"
    with pytest.raises(
        ValueError, match=rf"layers\.0\.mlp\.experts: {name} of expert 3 is {value}"
    ):
        loaded(csf, way, tensors=tensors)


def test_dummy_weights_get_constant_scales(csf) -> None:
    from vllm.config import set_current_vllm_config

    config = csf.layers.loading_csf("dummy")
    layer = csf.layers.make_streams(vllm_config=config)
    for parameter in (layer.w13_weight_scale_2, layer.w2_weight_scale_2):
        parameter.data.fill_(1e-3)
    with set_current_vllm_config(config):
        layer.quant_method.process_weights_after_loading(layer)
    layer.nvfp4_csf.expansion.expand()
    assert all((t.float() == 1).all() for t in layer.nvfp4_csf.scratch)


# Refusals ----------------------------------------------------------------------------------------------------------


def with_config(**changes: Any) -> Any:
    def change(config: Any) -> None:
        for path, value in changes.items():
            holder = config
            *parents, name = path.split("__")
            for parent in parents:
                holder = getattr(holder, parent)
            object.__setattr__(holder, name, value)

    return change


CONFIGURATIONS = [
    (with_config(parallel_config__pipeline_parallel_size=2), "use tensor parallelism only"),
    (with_config(parallel_config__data_parallel_size=2), "start one server per replica"),
    (with_config(parallel_config__enable_expert_parallel=True), "drop --enable-expert-parallel"),
    (with_config(parallel_config__enable_dbo=True), "drop --enable-dbo and --ubatch-size"),
    (with_config(parallel_config__ubatch_size=4), "drop --enable-dbo and --ubatch-size"),
    (with_config(offload_config__prefetch__offload_group_size=2), "drop --offload-group-size"),
    (with_config(offload_config__uva__cpu_offload_gb=4), "drop --cpu-offload-gb"),
]


@WAYS
@pytest.mark.parametrize(("change", "message"), CONFIGURATIONS)
def test_configurations_are_refused_with_what_to_change(
    csf, way: str, change, message: str
) -> None:
    config = csf.layers.loading_csf()
    change(config)
    make = csf.layers.make_streams if way == "streams" else csf.layers.make_compressing
    with pytest.raises(ValueError, match=message) as caught:
        make(vllm_config=config)
    assert ("VLLM_B12X_CSF_COMPRESS" in str(caught.value)) == (way == "compress")
    assert str(caught.value).startswith("NVFP4-CSF: ")


@pytest.mark.parametrize("load_format", ["auto", "safetensors", "runai_streamer"])
def test_other_load_formats_are_refused(csf, load_format: str) -> None:
    with pytest.raises(
        ValueError, match=f"load format '{load_format}' cannot read it: add --load-format nvfp4_csf"
    ):
        csf.layers.make_streams(vllm_config=csf.layers.loading_csf(load_format))


def geometry(csf: Any, **sizes: int) -> dict[str, Any]:
    from dataclasses import replace

    return {"geometry": replace(csf.layers.SMALL, **sizes)}


def test_layers_are_refused_with_what_to_change(csf, monkeypatch) -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    cases = [
        (geometry(csf, H=192), "hidden size 192 is no multiple of 128"),
        (geometry(csf, I=72), "72 intermediate values per rank are no multiple of 16: use fewer"),
        (geometry(csf, H=8192, I=16448), "use more tensor-parallel ranks"),
        (
            {
                "moe": {
                    "activation": MoEActivation.SITU,
                    "activation_situ_beta": 4.0,
                    "activation_situ_linear_beta": 25.0,
                }
            },
            "activation situ.* is not supported, only silu",
        ),
        ({"moe": {"in_dtype": torch.float16}}, "add --dtype bfloat16"),
        ({"apply_router_weight_on_input": True}, "router weights on the input"),
        ({"backend": "emulation"}, "add --moe-backend b12x"),
    ]
    for make in (csf.layers.make_streams, csf.layers.make_compressing):
        for arguments, message in cases:
            with pytest.raises(
                ValueError, match=rf"NVFP4-CSF: model\.layers\.0\.mlp\.experts: .*{message}"
            ):
                make(**arguments)
    monkeypatch.setenv("VLLM_B12X_MOE_FP4_FORCE_A16", "0")
    with pytest.raises(ValueError, match=r"set VLLM_B12X_MOE_FP4_FORCE_A16=1"):
        csf.layers.make_streams()


@pytest.mark.parametrize("a4_prefill", [False, True])
def test_a_b12x_without_dual_plans_is_refused(csf, a4_prefill: bool) -> None:
    """One that runs A4 over packed weights as well: packing copies the scales' values."""
    from support import reference_b12x
    from vllm.model_executor.layers.fused_moe.b12x_a4 import provider

    csf.b12x.dual = False
    if a4_prefill:
        csf.b12x.TPMoEScratchPlan = reference_b12x.ReferenceB12x(a4_prefill=True).TPMoEScratchPlan
    provider.get_provider.cache_clear()
    with pytest.raises(ValueError, match=r"NVFP4-CSF: the installed b12x .* cannot"):
        csf.layers.make_streams()


@WAYS
def test_sleep_level_2_is_refused(csf, way: str) -> None:
    from vllm.model_executor.layers.quantization.nvfp4_csf.refusals import refuse_sleep

    model = torch.nn.ModuleList([loaded(csf, way)])
    refuse_sleep(1, model, None)
    with pytest.raises(ValueError, match="use sleep level 1"):
        refuse_sleep(2, None, model)
    refuse_sleep(2, torch.nn.Linear(1, 1), None)


def test_other_methods_keep_their_layers(csf) -> None:
    from vllm.model_executor.layers.quantization.nvfp4_csf.method import for_layer

    other = object()
    assert for_layer(other, None, "model.layers.0.mlp.experts") is other
    checkpoint = SimpleNamespace(nvfp4_csf=object())
    csf.inventory.layers = frozenset({(False, 0)})
    assert for_layer(other, checkpoint, "model.layers.1.mlp.experts") is other
    assert for_layer(other, checkpoint, "mtp.layers.0.mlp.experts") is other
    with pytest.raises(ValueError, match="object cannot use them"):
        for_layer(other, checkpoint, "model.layers.0.mlp.experts")


def test_the_codec_of_the_tests_is_the_servers(csf) -> None:
    """Both import paths load the same file."""
    from vllm.model_executor.layers.quantization.nvfp4_csf import codec as served

    scales = plausible_scales(16, 4)
    assert (served.encode(scales).fixed == codec.encode(scales).fixed).all()
