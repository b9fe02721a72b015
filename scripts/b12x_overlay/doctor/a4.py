# SPDX-License-Identifier: Apache-2.0
"""A4 prefill by row type: which layers will be armed, and what stands in the way."""

from __future__ import annotations

from collections import Counter

from b12x_overlay.doctor import settings as names
from b12x_overlay.doctor.checkpoint import ExpertLayer
from b12x_overlay.doctor.features import (
    ELSEWHERE,
    NVFP4,
    W4A16,
    Obstacle,
    Seen,
    backend,
    blocked,
    force_a16,
    kernel_limits,
    offloading,
    several,
    unpatched,
)
from b12x_overlay.doctor.findings import Feature
from b12x_overlay.doctor.serveargs import ServeArgs

_GRAPH_LIMIT = 512  # vLLM's largest default capture size; see graph_limit
_W4A16_ONLY = (
    "data-parallel-size",
    "prefill-context-parallel-size",
    "ubatch-size",
    "enable-dbo",
    "kv-sharing-fast-prefill",
)


def feature(seen: Seen) -> Feature:
    """A4 prefill."""
    name, asked = "A4 prefill", seen.settings.arm
    obstacles = _obstacles(seen)
    if not asked:
        obstacles.insert(0, (f"{names.ARM} is not above 0", ""))
    if obstacles[int(not asked) :]:
        return blocked(name, asked, obstacles)
    if seen.checkpoint is None:
        why = "decided by the checkpoint's activation scales"
        return Feature(name, asked, None, why, "give --checkpoint FOLDER" if asked else "")
    target = [layer for layer in seen.checkpoint.layers if not layer.draft]
    armed = [layer for layer in target if armable(layer)]
    left = [layer for layer in seen.checkpoint.layers if layer not in armed]
    count = f"{len(armed)} of {len(target)} target layers"
    if not armed:
        why = f"no layer can be armed: {_reasons(left) or 'there are no expert layers'}"
        return Feature(name, asked, False, why, _remedy(target) if asked else "")
    if not asked:
        return Feature(name, False, False, f"{names.ARM} is not above 0; it would arm {count}")
    why = f"{count} armed" + (f"; not armed: {_reasons(left)}" if left else "")
    limit = graph_limit(seen.serve)
    if limit and not seen.settings.eager:
        why += f"; steps of up to {limit} rows replay CUDA graphs, W4A16 for all rows"
    if not seen.decided:
        return Feature(name, True, None, why, ELSEWHERE)
    return Feature(name, True, True, why)


def armable(layer: ExpertLayer) -> bool:
    """The rule of the server: NVFP4 with calibrated scales."""
    return layer.recipe == NVFP4 and layer.calibration.calibrated


def graph_limit(serve: ServeArgs) -> int | None:
    """Rows up to which a step replays a CUDA graph by default, None with --enforce-eager.

    vLLM: min(max_num_seqs x (1 + draft tokens) x 2, 512, max_num_batched_tokens).
    """
    if serve.on("enforce-eager"):
        return None
    compilation = serve.raw.get("compilation-config", {})
    given = compilation.get("max_cudagraph_capture_size")
    sizes = compilation.get("cudagraph_capture_sizes")
    if isinstance(given, int):
        return given
    if isinstance(sizes, list) and sizes and all(isinstance(size, int) for size in sizes):
        return int(max(sizes))
    limit = _GRAPH_LIMIT
    for name, factor in (
        ("max-num-seqs", 2 * (1 + serve.draft_tokens)),
        ("max-num-batched-tokens", 1),
    ):
        if serve.raw.get(name, 0) > 0:
            limit = min(limit, serve.raw[name] * factor)
    return limit


def eager(seen: Seen) -> Feature:
    """Steps with prefill rows bypass CUDA graphs."""
    name = "A4 eager steps"
    if not seen.settings.eager:
        return Feature(name, False, False, f"{names.EAGER} is not on")
    if not seen.settings.arm:
        return Feature(name, True, False, f"{names.ARM} is not above 0", f"set {names.ARM}=1")
    return Feature(name, True, True, "steps with prefill rows bypass CUDA graphs")


def keep_packed(seen: Seen) -> Feature:
    """Packed and native weights side by side."""
    name = "packed weights kept"
    if not seen.settings.keep_packed:
        return Feature(name, False, False, f"{names.KEEP_PACKED} is not on")
    if not seen.settings.arm:
        return Feature(name, True, False, f"{names.ARM} is not above 0", f"set {names.ARM}=1")
    if seen.settings.compress or (seen.checkpoint is not None and seen.checkpoint.csf):
        why = "packed weights hold scales of their own, CSF layers have none"
        return Feature(name, True, False, why, f"unset {names.KEEP_PACKED}")
    return Feature(name, True, True, "armed layers hold both layouts: twice the expert weights")


def _obstacles(seen: Seen) -> list[Obstacle]:
    """Why no layer can be armed, whatever the checkpoint's scales are."""
    found = unpatched(seen) + backend(seen)
    abilities = seen.provider.abilities
    if seen.provider.usable and not (abilities.dual_plan or abilities.a4_prefill):
        why = f"{seen.provider.label} has no weight plan for both modes"
        found.append((why, "install flashinfer-python==0.7.2.post1"))
    if abilities.a4_prefill and seen.settings.given.get(names.FORK_SWITCH, "").strip() == "0":
        found.append((f"{names.FORK_SWITCH}=0 forbids it", f"unset {names.FORK_SWITCH}"))
    if seen.checkpoint is not None and seen.checkpoint.quant.method == "compressed-tensors":
        why = "compressed-tensors checkpoints are never armed: their absent scales cannot be told from loaded ones"
        found.append((why, "use a ModelOpt NVFP4 checkpoint"))
    else:
        found += force_a16(seen)
    found += several(_W4A16_ONLY, seen, "all rows run W4A16")
    decoder_replay = any(
        "DeepseekV41" in str(entry) for entry in seen.config("architectures") or ()
    )
    if decoder_replay and seen.serve.raw.get("swa-bounded-replay") is not False:
        found.append(("decoder replay layers run on fewer rows", "add --no-swa-bounded-replay"))
    return found + kernel_limits(seen) + offloading(seen)


def _reasons(layers: list[ExpertLayer]) -> str:
    """ "2 draft layers W4A16_NVFP4, ...": one entry per kind."""
    kinds = Counter((layer.draft, _reason(layer)) for layer in layers)
    parts = []
    for (draft, reason), count in kinds.items():
        parts.append(
            f"{count} {'draft ' if draft else ''}layer{'s' if count > 1 else ''} {reason}".strip()
        )
    return ", ".join(parts)


def _reason(layer: ExpertLayer) -> str:
    if layer.recipe == W4A16:
        return "W4A16_NVFP4, weights only"
    if layer.draft:
        return ""
    if layer.recipe != NVFP4:
        return layer.recipe
    return f"not calibrated ({layer.calibration.reason})"


def _remedy(target: list[ExpertLayer]) -> str:
    if any(layer.recipe == NVFP4 for layer in target):
        return "calibrate the activations with ModelOpt, or use a calibrated export"
    return "use a ModelOpt NVFP4 checkpoint with activation scales"
