# SPDX-License-Identifier: Apache-2.0
"""NVFP4-CSF and its prefetch: will they be active, or would the checkpoint be refused or misread?"""

from __future__ import annotations

from b12x_overlay.doctor import settings as names
from b12x_overlay.doctor.checkpoint import Checkpoint
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
from b12x_overlay.doctor.quantconfig import CSF_METHOD

_REFUSED = ("pipeline-parallel-size", "data-parallel-size", "ubatch-size", "enable-dbo")


def feature(seen: Seen) -> Feature:
    """Scales kept compressed."""
    name = "NVFP4-CSF"
    stored = seen.checkpoint is not None and seen.checkpoint.csf
    asked = (
        stored
        or seen.settings.compress
        or CSF_METHOD in (seen.serve.quantization, seen.serve.load_format)
    )
    if not asked:
        what = "the checkpoint has plain scales" if seen.checkpoint else "no checkpoint was read"
        return Feature(name, False, False, f"{what}, and {names.COMPRESS} is not on")
    obstacles = unpatched(seen) + backend(seen)
    if seen.checkpoint is not None:
        obstacles += _checkpoint(seen, seen.checkpoint)
    obstacles += (
        several(_REFUSED, seen, "refused with CSF") + kernel_limits(seen) + offloading(seen)
    )
    if obstacles:
        return blocked(name, True, obstacles)
    if seen.checkpoint is None or not seen.decided:
        return Feature(name, True, None, "decided by checkpoint, command line and GPU", ELSEWHERE)
    return Feature(
        name, True, True, "read from the checkpoint" if stored else "compressed while loading"
    )


def prefetch(seen: Seen) -> Feature:
    """The next layer's scales expanded ahead of time."""
    name, csf = "CSF scale prefetch", feature(seen)
    if not seen.settings.prefetch:
        return Feature(name, False, False, f"{names.PREFETCH}=0")
    if not csf.asked or csf.active is False:
        return Feature(name, False, False, "needs NVFP4-CSF")
    stream = (
        "on a raised main stream"
        if seen.settings.raise_main_stream
        else f"main stream as it was ({names.RAISE_MAIN_STREAM}=0)"
    )
    why = f"on by default, for eager steps that expand all experts, {stream}"
    return Feature(name, False, csf.active, why)


def _checkpoint(seen: Seen, checkpoint: Checkpoint) -> list[Obstacle]:
    if checkpoint.bare_container:
        fix = "serve the folder that scripts/convert-csf makes with --serving-folder"
        return [("this is the container itself, not a folder that vLLM serves", fix)]
    target = [layer for layer in checkpoint.layers if not layer.draft]
    found: list[Obstacle] = []
    if any(layer.recipe == NVFP4 for layer in target):
        found += force_a16(seen)
    if checkpoint.csf:
        return found + _stored(seen, checkpoint)
    if CSF_METHOD in (seen.serve.quantization, seen.serve.load_format):
        fix = f"drop --quantization and --load-format {CSF_METHOD}; set {names.COMPRESS}=1 to compress at load"
        found.append(("the checkpoint has plain scales", fix))
    if checkpoint.quant.method != "modelopt" or not any(
        layer.recipe in (NVFP4, W4A16) for layer in target
    ):
        found.append(("no ModelOpt NVFP4 expert layers to compress", f"unset {names.COMPRESS}"))
    return found


def _stored(seen: Seen, checkpoint: Checkpoint) -> list[Obstacle]:
    if not checkpoint.quant.csf:
        fix = "make the folder again with scripts/convert-csf"
        return [
            (
                "the scales are CSF streams and the config does not say so: they would be misread",
                fix,
            )
        ]
    if not seen.serve.given:
        return []
    found: list[Obstacle] = []
    if seen.serve.load_format not in (CSF_METHOD, "dummy"):
        why = f"load format {seen.serve.load_format} cannot read compressed scales"
        found.append((why, f"add --load-format {CSF_METHOD}"))
    if seen.serve.quantization not in (
        "",
        CSF_METHOD,
        "modelopt",
        "modelopt_fp4",
        "modelopt_mixed",
    ):
        why = f"--quantization {seen.serve.quantization} is not this checkpoint's"
        found.append((why, f"use --quantization {CSF_METHOD}"))
    return found
