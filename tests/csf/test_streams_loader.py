# SPDX-License-Identifier: Apache-2.0
"""One rank's part of a layer's streams, against vLLM's own loading and swizzling of the plain scales."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from csf.streams import plausible_scales, unswizzle
from nvfp4_csf import codec, planes

EXPERTS, HIDDEN = 2, 256


@pytest.fixture(scope="module")
def loader(vllm):
    from vllm.model_executor.layers.quantization.nvfp4_csf import streams_loader

    return streams_loader


def model_scales(intermediate: int) -> dict[tuple[int, str], np.ndarray]:
    """Plain scales of the whole model's experts by expert and vLLM shard name."""
    shapes = {
        "w1": (intermediate, HIDDEN),
        "w3": (intermediate, HIDDEN),
        "w2": (HIDDEN, intermediate),
    }
    return {
        (expert, shard): plausible_scales(rows, k // 16, seed=10 * expert + number)
        for expert in range(EXPERTS)
        for number, (shard, (rows, k)) in enumerate(shapes.items())
    }


def packed(loader, scales: np.ndarray, name: str = "scales") -> torch.Tensor:
    streams = codec.encode(scales, name)
    return loader.pack(
        torch.from_numpy(streams.fixed), torch.from_numpy(streams.exceptions), *scales.shape
    )


def collect(loader, scales, intermediate: int, rank: int, ranks: int, seed: int = 0):
    streams = loader.RankStreams(EXPERTS, HIDDEN, intermediate, rank, ranks)
    order = list(scales)
    random.Random(seed).shuffle(order)
    for expert, shard in order:
        streams.add(expert, shard, packed(loader, scales[expert, shard]), f"{expert}.{shard}")
    return streams


def by_vllm(scales, intermediate: int, rank: int, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Swizzled scales of this rank as vLLM 0.33.0 prepares them for b12x W4A16 from a plain checkpoint."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.quantization.utils.b12x_moe import (
        prepare_nvfp4_moe_layer_for_b12x,
    )

    class Loader(RoutedExperts):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            parallel = type("P", (), {"tp_size": ranks})
            attributes = {
                "is_act_and_mul": True, "tp_shard_with_padding": False, "moe_parallel_config": parallel,
            }  # fmt: skip
            self.moe_config = type("M", (), attributes)

    share = intermediate // ranks
    w13 = torch.zeros(EXPERTS, 2 * share, HIDDEN // 16, dtype=torch.uint8)
    w2 = torch.zeros(EXPERTS, HIDDEN, share // 16, dtype=torch.uint8)
    for (expert, shard), values in scales.items():
        Loader()._load_model_weight_or_group_weight_scale(
            shard_dim=1 if shard == "w2" else 0,
            expert_data=(w2 if shard == "w2" else w13)[expert],
            shard_id=shard,
            loaded_weight=torch.from_numpy(values),
            tp_rank=rank,
        )
    ones = torch.ones(EXPERTS)
    prepared = prepare_nvfp4_moe_layer_for_b12x(
        w13=torch.zeros(EXPERTS, 2 * share, HIDDEN // 2, dtype=torch.uint8),
        w13_scale=w13.view(torch.float8_e4m3fn),
        w13_scale_2=ones,
        a13_scale=ones,
        w2=torch.zeros(EXPERTS, HIDDEN, share // 2, dtype=torch.uint8),
        w2_scale=w2.view(torch.float8_e4m3fn),
        w2_scale_2=ones,
        a2_scale=ones,
        is_act_and_mul=True,
        reorder_w13=True,
    )
    return prepared[1].view(torch.uint8).numpy(), prepared[5].view(torch.uint8).numpy()


@pytest.mark.parametrize(
    ("intermediate", "ranks"),
    [
        (128, 1),
        (256, 2),
        (288, 3),  # 96 per rank, padded to 128
        (480, 6),  # 80 per rank: five columns, so that rank 1 starts inside a pair of nibbles
        (512, 8),
        (384, 8),  # 48 per rank: three columns
    ],
)
def test_every_rank_gets_what_vllm_would_load(loader, intermediate: int, ranks: int) -> None:
    scales = model_scales(intermediate)
    share = intermediate // ranks
    padded = -(-share // 64) * 64
    for rank in range(ranks):
        w13, w2 = collect(loader, scales, intermediate, rank, ranks, seed=rank).planes("cpu")
        wanted13, wanted2 = by_vllm(scales, intermediate, rank, ranks)
        found13, found2 = planes.expand(w13).numpy(), planes.expand(w2).numpy()
        assert found13.shape == wanted13.shape == (EXPERTS, 2 * padded, HIDDEN // 16)
        assert found2.shape == wanted2.shape == (EXPERTS, HIDDEN, padded // 16)
        for expert in range(EXPERTS):
            ours, theirs = (
                unswizzle(x[expert], 2 * padded, HIDDEN // 16) for x in (found13, wanted13)
            )
            real = np.r_[0:share, padded : padded + share]
            assert np.array_equal(ours[real], theirs[real])
            assert np.array_equal(
                ours[:share], scales[expert, "w3"][rank * share : (rank + 1) * share]
            )
            assert (np.delete(ours, real, 0) == 0x38).all()
            ours, theirs = (unswizzle(x[expert], HIDDEN, padded // 16) for x in (found2, wanted2))
            assert np.array_equal(ours[:, : share // 16], theirs[:, : share // 16])
            assert not np.isin(ours, [0x7F, 0xFF]).any()


def test_order_of_arrival_does_not_matter(loader) -> None:
    scales = model_scales(128)
    results = [collect(loader, scales, 128, 0, 1, seed).planes("cpu") for seed in range(3)]
    for other in results[1:]:
        for ours, theirs in zip(results[0], other, strict=True):
            assert torch.equal(ours.fixed, theirs.fixed)
            assert torch.equal(ours.exceptions, theirs.exceptions)


def test_missing_parts_are_listed(loader) -> None:
    scales = model_scales(128)
    del scales[1, "w3"]
    assert collect(loader, scales, 128, 0, 1).missing() == ["1/w3"]


def test_the_same_tensor_again_is_no_duplicate_but_another_is(loader) -> None:
    scales = model_scales(128)
    streams = loader.RankStreams(EXPERTS, HIDDEN, 128, 0, 1)
    first = packed(loader, scales[0, "w1"])
    streams.add(0, "w1", first, "gate")
    streams.add(0, "w1", first.unsqueeze(0)[0], "gate")
    with pytest.raises(ValueError, match="gate: given twice for expert 0"):
        streams.add(0, "w1", packed(loader, scales[0, "w1"]), "gate")


def test_another_tensor_at_a_freed_address_is_no_repetition(loader) -> None:
    scales = model_scales(128)
    streams = loader.RankStreams(EXPERTS, HIDDEN, 128, 0, 1)
    memory = packed(loader, scales[0, "w2"])
    first = memory.view(-1)
    streams.add(0, "w2", first, "down")
    del first  # its memory lives on, as that of a freed tensor in an allocator does
    with pytest.raises(ValueError, match="given twice"):
        streams.add(0, "w2", memory.view(-1), "down")


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_rank_keeps_its_own_part_only(loader, ranks: int) -> None:
    """A slice is a view: the whole model's streams would stay in every rank's memory until the load ends."""
    intermediate = 128 * ranks
    streams = loader.RankStreams(EXPERTS, HIDDEN, intermediate, 1, ranks)
    given = {}
    for (expert, shard), values in model_scales(intermediate).items():
        given[expert, shard] = packed(loader, values)
        streams.add(expert, shard, given[expert, shard], shard)
    for place, part in streams._parts.items():
        assert not np.shares_memory(part.fixed, given[place].numpy())
        owner = part.fixed
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        assert owner.nbytes <= 1.5 * given[place].numel() / ranks


def test_what_is_not_this_layers_streams_is_refused(loader) -> None:
    streams = loader.RankStreams(EXPERTS, HIDDEN, 128, 0, 1)
    plain = torch.zeros(128, HIDDEN // 16, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="reached a layer whose scales are compressed"):
        streams.add(0, "w1", plain, "gate")
    with pytest.raises(ValueError, match="reached a layer whose scales are compressed"):
        streams.add(0, "w1", torch.zeros(5000, dtype=torch.uint8), "gate")
    with pytest.raises(
        ValueError, match=r"up: scales of a weight \[64, 256\], the layer's is \[128, 256\]"
    ):
        streams.add(0, "w3", packed(loader, plausible_scales(64, HIDDEN // 16)), "up")
    good = codec.encode(plausible_scales(128, HIDDEN // 16))
    fixed = torch.from_numpy(good.fixed.copy())
    fixed[0] = 255
    bad = loader.pack(fixed, torch.from_numpy(good.exceptions), 128, HIDDEN // 16)
    with pytest.raises(loader.CsfStreamError, match="up: fixed stream, byte 0: base 255"):
        streams.add(0, "w3", bad, "up")
    assert len(streams.missing()) == 3 * EXPERTS


def test_shares_without_whole_groups_are_refused(loader) -> None:
    with pytest.raises(ValueError, match="intermediate size 320 over 8 ranks"):
        loader.RankStreams(EXPERTS, HIDDEN, 320, 0, 8)
