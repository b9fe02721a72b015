# SPDX-License-Identifier: Apache-2.0
"""What the reference b12x promises, asked of any b12x; run with the reference and, in child processes, the real ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

E, H, N, TOPK = 8, 512, 256, 2
GEOMETRIES = ((8, 512, 256, 2), (16, 512, 192, 4), (64, 1024, 256, 8), (288, 4096, 1024, 8))
TOKENS = (
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    9,
    12,
    16,
    24,
    31,
    33,
    48,
    64,
    100,
    128,
    300,
    512,
    1000,
    2048,
    4096,
)


def real(**arguments: Any) -> dict[str, Any]:
    """For ``run_child``: all answers of the b12x on PYTHONPATH."""
    from support import sm120

    sm120.install()
    from b12x.moe import fused_moe
    from vllm.model_executor.layers.fused_moe.b12x_a4.provider import get_provider

    found = get_provider()
    provider = {"name": found.name, "kind": found.kind, "missing": found.missing}
    return {"provider": provider, **answers(fused_moe, **arguments)}


def answers(b12x: Any, with_numerics: bool = False) -> dict[str, Any]:
    """JSON-able answers; equal for the reference and for both real libraries."""
    result = {
        "plans": plans(b12x),
        "regimes": regimes(b12x),
        "preparation": preparation(b12x),
        "refusals": refusals(b12x),
        "proof": proof(b12x),
    }
    if with_numerics:
        result["numerics"] = library_reference()
    return result


def plan_weights(
    b12x: Any, modes: Any, layout: str = "w13", geometry: tuple[int, ...] = (E, H, N)
) -> Any:
    experts, hidden, n = geometry[:3]
    return b12x.plan_weights(
        quant_modes=modes, source_format="modelopt_nvfp4", activation="silu", params_dtype=torch.bfloat16,
        num_experts=experts, hidden_size=hidden, intermediate_size=n, w13_layout=layout,
    )  # fmt: skip


def plans(b12x: Any) -> list[Any]:
    """What a weight plan says about itself."""
    return [
        [
            sorted(plan.quant_modes), plan.discards_source_parameters, plan.w4a16_weight_layout, plan.w13_layout,
            plan.num_experts, plan.hidden_size, plan.intermediate_size, plan.activation, plan.io_dtype,
        ]
        for modes in (("nvfp4", "w4a16"), "nvfp4", "w4a16")
        for plan in (plan_weights(b12x, modes),)
    ]  # fmt: skip


def caps(b12x: Any, plan: Any, mode: str, tokens: int, topk: int = TOPK, **more: Any) -> Any:
    return b12x.Caps(
        max_tokens=tokens, num_topk=topk, device="cpu", weight_plan=plan, core_token_counts=(tokens,),
        route_num_experts=0, quant_mode=mode, frozen=True, **more,
    )  # fmt: skip


def regimes(b12x: Any) -> list[Any]:
    """Kernel family and scheduling of each mode, weight layout, geometry and capacity."""
    found = []
    for geometry in GEOMETRIES:
        for modes, mode in (
            (("nvfp4", "w4a16"), "nvfp4"),
            (("nvfp4", "w4a16"), "w4a16"),
            ("w4a16", "w4a16"),
        ):
            plan = plan_weights(b12x, modes, geometry=geometry)
            for tokens in TOKENS:
                config = caps(b12x, plan, mode, tokens, geometry[3]).decode_config
                found.append(
                    [
                        *geometry, mode, len(plan.quant_modes), tokens, config.backend, config.dynamic_tile_m,
                        config.dynamic_route_mode, config.w4a16_route_mode, config.nvfp4_share_input,
                        config.nvfp4_materialize_intermediate,
                    ]
                )  # fmt: skip
    return found


def sources(seed: int = 0) -> dict[str, torch.Tensor]:
    """Source tensors of the geometry (E, H, N): weights uint8, scales E4M3 in F8_128x4 order, fp32 vectors [E]."""
    from support.reference_b12x import numerics

    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator)

    return {
        "w1_fp4": torch.randint(0, 256, (E, 2 * N, H // 2), generator=generator, dtype=torch.uint8),
        "w1_blockscale": numerics.swizzle(random(E, 2 * N, H // 16) + 0.5),
        "w1_global_scale": (random(E) + 0.5) * 1e-2,
        "a1_gscale": torch.full((E,), 100.0),
        "w2_fp4": torch.randint(0, 256, (E, H, N // 2), generator=generator, dtype=torch.uint8),
        "w2_blockscale": numerics.swizzle(random(E, H, N // 16) + 0.5),
        "w2_global_scale": (random(E) + 0.5) * 1e-2,
        "a2_gscale": (random(E) + 0.5) * 100,
    }


def prepare(b12x: Any, modes: Any, given: dict[str, torch.Tensor], **more: Any) -> Any:
    plan = plan_weights(b12x, modes)
    return b12x.prepare_weights(plan=plan, params_dtype=torch.bfloat16, **given, **more)


def preparation(b12x: Any) -> dict[str, Any]:
    """Zero copy of a dual plan, fresh alphas, and packing that rewrites its sources."""
    given = sources()
    dual = prepare(b12x, ("nvfp4", "w4a16"), given)
    value = getattr(dual.representation, "value", dual.representation)
    same = {
        "w1": dual.w1_fp4.data_ptr() == given["w1_fp4"].data_ptr() == value.w13.data_ptr(),
        "w2": dual.w2_fp4.data_ptr() == given["w2_fp4"].data_ptr() == value.w2.data_ptr(),
        "s1": dual.w1_blockscale.data_ptr()
        == given["w1_blockscale"].data_ptr()
        == value.w13_scale.data_ptr(),
        "s2": dual.w2_blockscale.data_ptr()
        == given["w2_blockscale"].data_ptr()
        == value.w2_scale.data_ptr(),
        "a1": dual.a1_gscale.data_ptr() == given["a1_gscale"].data_ptr(),
        "a2": dual.a2_gscale.data_ptr() == given["a2_gscale"].data_ptr(),
        "alpha1": dual.w1_alphas.equal(given["w1_global_scale"] / given["a1_gscale"]),
        "alpha2": dual.w2_alphas.equal(given["w2_global_scale"] / given["a2_gscale"]),
        "raw1": value.w13_global_scale.equal(given["w1_global_scale"]),
        "raw2": value.w2_global_scale.equal(given["w2_global_scale"]),
        "sources unchanged": all(given[name].equal(tensor) for name, tensor in sources().items()),
    }
    given = sources()
    packed = prepare(b12x, "w4a16", given)
    same["packed in place"] = (
        packed.w1_fp4.untyped_storage().data_ptr() == given["w1_fp4"].data_ptr()
    )
    same["packing rewrites"] = not given["w1_fp4"].equal(sources()["w1_fp4"])
    same["packed scales are new"] = (
        packed.w1_blockscale.data_ptr() != given["w1_blockscale"].data_ptr()
    )
    return same


def call(rows: int, scratch: int, hidden: int = H, topk: int = TOPK) -> dict[str, torch.Tensor]:
    return {
        "scratch": torch.zeros(scratch, dtype=torch.uint8),
        "a": torch.zeros(rows, hidden, dtype=torch.bfloat16),
        "topk_weights": torch.zeros(rows, topk),
        "topk_ids": torch.zeros(rows, topk, dtype=torch.int32),
        "output": torch.zeros(rows, hidden, dtype=torch.bfloat16),
    }


def refusals(b12x: Any) -> dict[str, str]:
    """Type of the error for each misuse, "" where none is raised."""
    dual = prepare(b12x, ("nvfp4", "w4a16"), sources())
    other = prepare(b12x, "nvfp4", sources())
    cases = {}
    for mode in ("nvfp4", "w4a16"):
        plan = b12x.plan(caps(b12x, dual.plan, mode, 16))
        nbytes = int(plan.scratch_specs()[0].shape[0])

        def attempt(
            name: str, experts: Any, inputs: dict[str, Any], plan: Any = plan, mode: str = mode
        ) -> None:
            cases[f"{mode} {name}"] = _error(lambda: b12x.bind(plan, experts=experts, **inputs))

        attempt("exact scratch", dual, call(16, nbytes))
        attempt("fewer rows, more scratch", dual, call(5, nbytes + 64))
        attempt("too many rows", dual, call(17, nbytes))
        attempt("too little scratch", dual, call(16, nbytes - 1))
        attempt("other hidden size", dual, call(16, nbytes, hidden=H * 2))
        attempt("other top-k", dual, call(16, nbytes, topk=3))
        attempt("experts of another plan", other, call(16, nbytes))
        attempt(
            "scratch of another dtype", dual, {**call(16, nbytes), "scratch": torch.zeros(nbytes)}
        )
        scratch = torch.zeros(2 * nbytes, dtype=torch.uint8)[::2]
        attempt("strided scratch", dual, {**call(16, nbytes), "scratch": scratch})
    nvfp4_only = plan_weights(b12x, "nvfp4")
    cases["mode absent from the plan"] = _error(lambda: caps(b12x, nvfp4_only, "w4a16", 4))
    cases["unknown mode"] = _error(lambda: plan_weights(b12x, "w1a1"))
    return cases


def proof(b12x: Any) -> dict[str, bool]:
    """When one quantisation of a row may serve all experts."""
    import dataclasses

    def shared(experts: Any, static: bool = True) -> bool:
        return bool(experts.can_share_input(input_scales_static=static))

    given = sources()
    proven = prepare(b12x, ("nvfp4", "w4a16"), given, immutable_input_scales=True)
    facts = {"proven": shared(proven), "not static": shared(proven, static=False)}
    facts["not asked for"] = shared(prepare(b12x, ("nvfp4", "w4a16"), sources()))
    uneven = sources()
    uneven["a1_gscale"][3] = 7.0
    facts["not uniform"] = shared(
        prepare(b12x, ("nvfp4", "w4a16"), uneven, immutable_input_scales=True)
    )
    scalar = {**sources(), "a1_gscale": torch.tensor([100.0])}
    facts["one value"] = shared(prepare(b12x, ("nvfp4", "w4a16"), scalar))
    given["a1_gscale"].copy_(torch.full((E,), 50.0))
    facts["after a mutation"] = shared(proven)
    facts["renewed"] = shared(dataclasses.replace(proven))
    return facts


def _error(action: Any) -> str:
    try:
        action()
    except Exception as error:
        return type(error).__name__
    return ""


def numerics_case() -> SimpleNamespace:
    """Inputs for a comparison of results: 3 rows on the geometry (E, H, N)."""
    generator = torch.Generator().manual_seed(11)
    ids = torch.stack([torch.randperm(E, generator=generator)[:TOPK] for _ in range(3)]).to(
        torch.int32
    )
    return SimpleNamespace(
        x=torch.randn(3, H, generator=generator).to(torch.bfloat16),
        ids=ids,
        weights=torch.rand(3, TOPK, generator=generator),
    )


def library_reference() -> list[list[float]]:
    """b12x's own host reference of the NVFP4 MoE (not its kernels) on :func:`numerics_case`."""
    from b12x.moe._shared.kernels.reference import moe_reference_nvfp4

    given, case = sources(), numerics_case()
    out = moe_reference_nvfp4(
        case.x, given["w1_fp4"], given["w1_blockscale"], given["w1_global_scale"] / given["a1_gscale"],
        given["w2_fp4"], given["w2_blockscale"], given["w2_global_scale"] / given["a2_gscale"], given["a1_gscale"],
        given["a2_gscale"], case.ids, case.weights, E, H, N,
    )  # fmt: skip
    return out.float().tolist()
