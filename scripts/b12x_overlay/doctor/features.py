# SPDX-License-Identifier: Apache-2.0
"""Which features will be active: the arming table of README, evaluated on what was examined."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from b12x_overlay.doctor import settings as names
from b12x_overlay.doctor.checkpoint import Checkpoint, ExpertLayer
from b12x_overlay.doctor.findings import Feature
from b12x_overlay.doctor.provider import Provider
from b12x_overlay.doctor.serveargs import ServeArgs
from b12x_overlay.doctor.settings import Settings

NVFP4, W4A16 = "NVFP4", "W4A16_NVFP4"
_GRAPH_LIMIT = 512  # vLLM's default max_cudagraph_capture_size for few sequences; see graph_limit


@dataclass(frozen=True)
class Seen:
    """All that was examined.

    Attributes:
        patched: the vllm that is installed here holds the patch set; None if there is no vllm.
        gpu_ok: every visible GPU is SM120 or SM121; None if none can be seen.
    """

    settings: Settings
    serve: ServeArgs
    checkpoint: Checkpoint | None
    provider: Provider
    patched: bool | None
    gpu_ok: bool | None


def evaluate(seen: Seen) -> list[Feature]:
    """Every feature, asked for or not, in README's order."""
    return [
        _backend(seen),
        _a4(seen),
        _eager(seen),
        _keep_packed(seen),
        _csf(seen),
        _prefetch(seen),
    ]


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


def wants_gpu(seen: Seen) -> bool:
    """Something that was asked for runs on the GPU."""
    return seen.serve.given or seen.settings.arm or seen.settings.compress


def _backend(seen: Seen) -> Feature:
    name = "b12x MoE backend"
    asked = seen.serve.moe_backend == "b12x"
    if seen.serve.moe_backend == "flashinfer_b12x":
        why = "--moe-backend flashinfer_b12x is FlashInfer's own port, not the b12x package"
        return Feature(name, seen.settings.arm, False, why, "use --moe-backend b12x")
    if not asked:
        wanted = seen.settings.arm or seen.settings.compress
        if not seen.serve.given:
            return Feature(
                name,
                wanted,
                None,
                "no command line given",
                "add it: doctor -- vllm serve MODEL ...",
            )
        why = f"--moe-backend is {seen.serve.moe_backend}; vLLM never selects b12x by itself"
        return Feature(name, wanted, False, why, "add --moe-backend b12x")
    blocked = _blocked(seen)
    if blocked:
        return Feature(name, True, False, *blocked)
    if seen.gpu_ok is None:
        return Feature(
            name, True, None, "no GPU can be seen from here", "run doctor where the server runs"
        )
    return Feature(name, True, True, f"--moe-backend b12x, {seen.provider.label}")


def _blocked(seen: Seen) -> tuple[str, str] | None:
    """Why b12x experts cannot be used at all: (reason, remedy)."""
    if not seen.provider.usable:
        return f"import b12x gives {seen.provider.label}", "see the b12x line above"
    if seen.gpu_ok is False:
        return "a visible GPU is not SM120 or SM121", "see the gpu line above"
    if seen.serve.on("enable-expert-parallel"):
        return "b12x experts do not run with expert parallel", "remove --enable-expert-parallel"
    return None


def _a4(seen: Seen) -> Feature:
    name, asked = "A4 prefill", seen.settings.arm
    blocked = _a4_blocked(seen)
    if blocked:
        why = "; ".join(reason for reason, _ in blocked)
        return Feature(
            name, asked, False, why, "; ".join(fix for _, fix in blocked) if asked else ""
        )
    if seen.checkpoint is None:
        what = "decided by the checkpoint's activation scales"
        return Feature(name, asked, None, what, "give --checkpoint FOLDER" if asked else "")
    target = [layer for layer in seen.checkpoint.layers if not layer.draft]
    armed = [layer for layer in target if _armable(layer)]
    count = f"{len(armed)} of {len(target)} target layers"
    others = _reasons([layer for layer in seen.checkpoint.layers if not _armable(layer)])
    if not armed:
        return Feature(
            name, asked, False, f"no layer can be armed: {others}", _remedy(target) if asked else ""
        )
    if not asked:
        why = f"{names.ARM} is not set; it would arm {count}"
        return Feature(name, False, False, why)
    why = f"{count} armed" + (f"; not armed: {others}" if others else "")
    limit = graph_limit(seen.serve)
    if limit and not seen.settings.eager:
        why += f"; steps of up to {limit} rows replay CUDA graphs, W4A16 for all rows"
    if seen.gpu_ok is None or not seen.serve.given:
        return Feature(
            name, True, None, why, "run doctor where the server runs, with its command line"
        )
    return Feature(name, True, True, why)


def _armable(layer: ExpertLayer) -> bool:
    return layer.recipe == NVFP4 and layer.calibration.calibrated


def _a4_blocked(seen: Seen) -> list[tuple[str, str]]:
    """Why no layer can be armed whatever the checkpoint's scales are: every (reason, remedy)."""
    found = []
    if seen.patched is not True:
        what = (
            "no vllm is installed here"
            if seen.patched is None
            else "the vllm here does not hold the patch set"
        )
        found.append((what, "run the beta image, or scripts/apply-patches --target installed"))
    if seen.serve.given and seen.serve.moe_backend != "b12x":
        found.append((f"--moe-backend is {seen.serve.moe_backend}", "add --moe-backend b12x"))
    blocked = _blocked(seen)
    abilities = seen.provider.abilities
    if blocked:
        found.append(blocked)
    elif not (abilities.dual_plan or abilities.a4_prefill):
        why = f"{seen.provider.label} has no weight plan for both modes"
        found.append((why, "install flashinfer-python==0.7.2.post1"))
    if seen.checkpoint is not None and seen.checkpoint.quant.method == "compressed-tensors":
        why = "compressed-tensors checkpoints are never armed: their absent scales become 1"
        found.append((why, "use a ModelOpt NVFP4 checkpoint"))
    elif not seen.settings.force_a16:
        why = f"{names.FORCE_A16} is not 1: all rows run W4A4, as upstream"
        found.append((why, f"set {names.FORCE_A16}=1"))
    return found + _w4a16_only(seen.serve)


def _w4a16_only(serve: ServeArgs) -> list[tuple[str, str]]:
    """Set-ups in which rows and context cannot be matched, so that all rows run W4A16."""
    found = []
    for flag in ("data-parallel-size", "prefill-context-parallel-size", "ubatch-size"):
        if serve.count(flag, 0) > 1:
            found.append(
                (f"with --{flag} {serve.count(flag)} all rows run W4A16", f"remove --{flag}")
            )
    for flag in ("enable-dbo", "kv-sharing-fast-prefill"):
        if serve.on(flag):
            found.append((f"with --{flag} all rows run W4A16", f"remove --{flag}"))
    return found


def _reasons(layers: list[ExpertLayer]) -> str:
    """ "2 draft layers W4A16_NVFP4 (no input scales), ...": one entry per kind."""
    kinds = Counter((layer.draft, _reason(layer)) for layer in layers)
    parts = []
    for (draft, reason), count in kinds.items():
        parts.append(f"{count} {'draft ' if draft else ''}layer{'s' if count > 1 else ''} {reason}")
    return ", ".join(parts) or "there are no expert layers"


def _reason(layer: ExpertLayer) -> str:
    if layer.recipe == W4A16:
        return "W4A16_NVFP4, weights only"
    if layer.recipe != NVFP4:
        return layer.recipe
    return f"not calibrated ({layer.calibration.reason})"


def _remedy(target: list[ExpertLayer]) -> str:
    if any(layer.recipe == NVFP4 for layer in target):
        return "calibrate the activations with ModelOpt, or use a calibrated export"
    return "use a ModelOpt NVFP4 checkpoint with activation scales"


def _eager(seen: Seen) -> Feature:
    asked = seen.settings.eager
    if not asked:
        return Feature("A4 eager steps", False, False, f"{names.EAGER} is not set")
    if not seen.settings.arm:
        return Feature(
            "A4 eager steps", True, False, f"{names.ARM} is not above 0", f"set {names.ARM}=1"
        )
    return Feature("A4 eager steps", True, True, "steps with prefill rows bypass CUDA graphs")


def _keep_packed(seen: Seen) -> Feature:
    name, asked = "packed weights kept", seen.settings.keep_packed
    if not asked:
        return Feature(name, False, False, f"{names.KEEP_PACKED} is not set")
    if not seen.settings.arm:
        return Feature(name, True, False, f"{names.ARM} is not above 0", f"set {names.ARM}=1")
    if seen.checkpoint is not None and (seen.checkpoint.csf or seen.settings.compress):
        why = "packed weights hold their own scales; CSF has none per layer"
        return Feature(name, True, False, why, f"unset {names.KEEP_PACKED}")
    return Feature(name, True, True, "armed layers hold both layouts: twice the expert weights")


def _csf(seen: Seen) -> Feature:
    name = "NVFP4-CSF"
    stored = seen.checkpoint is not None and seen.checkpoint.csf
    asked = stored or seen.settings.compress or seen.serve.quantization == "nvfp4_csf"
    if not asked:
        return Feature(
            name, False, False, f"the checkpoint has plain scales and {names.COMPRESS} is not set"
        )
    if seen.patched is not True:
        fix = "run the beta image, or scripts/apply-patches --target installed"
        return Feature(name, True, False, "no patched vllm here", fix)
    if seen.checkpoint is not None:
        wrong = _csf_mismatch(seen, seen.checkpoint)
        if wrong:
            return Feature(name, True, False, *wrong)
    if seen.serve.given and seen.serve.moe_backend != "b12x":
        return Feature(
            name,
            True,
            False,
            f"--moe-backend is {seen.serve.moe_backend}",
            "add --moe-backend b12x",
        )
    blocked = _blocked(seen)
    if blocked:
        return Feature(name, True, False, *blocked)
    for flag in ("pipeline-parallel-size", "data-parallel-size"):
        if seen.serve.count(flag) > 1:
            return Feature(
                name, True, False, f"--{flag} above 1 is refused with CSF", f"remove --{flag}"
            )
    if seen.serve.on("enable-dbo"):
        return Feature(name, True, False, "--enable-dbo is refused with CSF", "remove --enable-dbo")
    why = "read from the checkpoint" if stored else "compressed at load"
    return Feature(name, True, True if seen.serve.given and seen.gpu_ok else None, why)


def _csf_mismatch(seen: Seen, checkpoint: Checkpoint) -> tuple[str, str] | None:
    flags = "--quantization nvfp4_csf --load-format nvfp4_csf"
    if checkpoint.bare_container:
        return (
            "this is a bare CSF container, not a folder that vLLM serves",
            f"serve a folder made for it, with {flags}",
        )
    if not checkpoint.csf and not seen.settings.compress:
        return (
            "the checkpoint has plain scales",
            f"set {names.COMPRESS}=1, or remove --quantization nvfp4_csf",
        )
    if checkpoint.csf and seen.settings.compress:
        return None
    if checkpoint.csf and not checkpoint.quant.csf:
        fix = "its config must say so: convert it again with scripts/convert-csf"
        return (
            "the scales are CSF streams and the config does not say so: they would be misread",
            fix,
        )
    given = (seen.serve.quantization, seen.serve.load_format)
    if (
        checkpoint.quant.csf == "container"
        and seen.serve.given
        and given != ("nvfp4_csf", "nvfp4_csf")
    ):
        return (
            f"a CSF container needs both flags, given are {given[0] or 'none'} and {given[1]}",
            f"add {flags}",
        )
    layers = [layer for layer in checkpoint.layers if not layer.draft]
    if not checkpoint.csf and not any(layer.recipe in (NVFP4, W4A16) for layer in layers):
        return "no NVFP4 expert layers to compress", f"unset {names.COMPRESS}"
    return None


def _prefetch(seen: Seen) -> Feature:
    csf = _csf(seen)
    name = "CSF scale prefetch"
    if not seen.settings.prefetch:
        return Feature(name, False, False, f"{names.PREFETCH}=0")
    if not csf.asked or csf.active is False:
        return Feature(name, False, False, "needs NVFP4-CSF")
    return Feature(
        name, False, csf.active, "on by default, for eager steps that expand all experts"
    )
