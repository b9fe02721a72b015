# SPDX-License-Identifier: Apache-2.0
"""Which features will be active: README's tables, evaluated on what was examined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from b12x_overlay.doctor import settings as names
from b12x_overlay.doctor.checkpoint import Checkpoint
from b12x_overlay.doctor.findings import Feature
from b12x_overlay.doctor.provider import Provider
from b12x_overlay.doctor.serveargs import ServeArgs
from b12x_overlay.doctor.settings import Settings

Obstacle = tuple[str, str]
"""Why something cannot be, and what to change."""

NVFP4, W4A16 = "NVFP4", "W4A16_NVFP4"
APPLY = "run the beta image, or scripts/apply-patches --target installed"
ELSEWHERE = "run doctor where the server runs, with its command line"


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

    @property
    def decided(self) -> bool:
        """Command line and GPU are known: "active" can be said."""
        return self.serve.given and self.gpu_ok is not None

    def config(self, name: str) -> Any:
        """A value of the checkpoint's config, None if unknown."""
        return self.checkpoint.config.get(name) if self.checkpoint else None


def wants_gpu(seen: Seen) -> bool:
    """Something that was asked for runs on the GPU."""
    return seen.serve.given or seen.settings.arm or seen.settings.compress


def unpatched(seen: Seen) -> list[Obstacle]:
    """The installed vllm lacks the patch set."""
    if seen.patched is True:
        return []
    what = (
        "no vllm is installed here"
        if seen.patched is None
        else "the vllm here does not hold the patch set"
    )
    return [(what, APPLY)]


def backend(seen: Seen) -> list[Obstacle]:
    """What keeps b12x experts from being used at all."""
    found = []
    if seen.serve.given and seen.serve.moe_backend != "b12x":
        found.append((f"--moe-backend is {seen.serve.moe_backend}", "add --moe-backend b12x"))
    if not seen.provider.usable:
        found.append((f"import b12x gives {seen.provider.label}", "see the b12x line above"))
    if seen.gpu_ok is False:
        found.append(("a visible GPU is not SM120 or SM121", "see the gpu line above"))
    if seen.serve.on("enable-expert-parallel"):
        found.append(
            ("b12x experts do not run with expert parallel", "remove --enable-expert-parallel")
        )
    return found


def force_a16(seen: Seen) -> list[Obstacle]:
    """NVFP4 layers run W4A16 only with upstream's switch."""
    if seen.settings.force_a16:
        return []
    return [
        (f"{names.FORCE_A16} is not 1: all rows run W4A4, as upstream", f"set {names.FORCE_A16}=1")
    ]


def kernel_limits(seen: Seen) -> list[Obstacle]:
    """Shape, activation and dtype that the dual weight plan needs."""
    found = []
    hidden, activation = seen.config("hidden_size"), seen.config("hidden_act")
    if isinstance(hidden, int) and hidden % 128:
        found.append((f"hidden size {hidden} is no multiple of 128", "use another model"))
    if isinstance(activation, str) and activation not in ("silu", "swish"):
        found.append((f"activation {activation}, only silu is supported", "use another model"))
    if str(seen.config("model_type") or "").startswith("llama4"):
        found.append(("Llama 4 applies router weights to the input", "use another model"))
    dtype = str(seen.serve.raw.get("dtype", "auto"))
    if dtype in ("auto", ""):
        dtype = str(seen.config("dtype") or seen.config("torch_dtype") or "bfloat16")
    if dtype.removeprefix("torch.") != "bfloat16":
        found.append((f"activations are {dtype}", "add --dtype bfloat16"))
    return found


def offloading(seen: Seen) -> list[Obstacle]:
    """Weight offloading moves tensors that captured graphs read; the server stops at start."""
    found = []
    for flag in ("cpu-offload-gb", "offload-group-size"):
        value = str(seen.serve.raw.get(flag, "0"))
        if value.strip("0."):  # anything but 0, 0.0, 00
            found.append((f"--{flag} {value} stops the server at start", f"remove --{flag}"))
    return found


def several(flags: tuple[str, ...], seen: Seen, why: str) -> list[Obstacle]:
    """Integer flags above 1 and switches that are on."""
    found = []
    for flag in flags:
        if flag in seen.serve.raw and (
            seen.serve.raw[flag] is True or seen.serve.count(flag, 0) > 1
        ):
            given = "" if seen.serve.raw[flag] is True else f" {seen.serve.raw[flag]}"
            found.append((f"--{flag}{given}: {why}", f"remove --{flag}"))
    return found


def blocked(name: str, asked: bool, obstacles: list[Obstacle]) -> Feature:
    """A feature with all its obstacles, each remedy once."""
    fixes = "; ".join(dict.fromkeys(fix for _, fix in obstacles if fix))
    return Feature(
        name, asked, False, "; ".join(reason for reason, _ in obstacles), fixes if asked else ""
    )


def backend_feature(seen: Seen) -> Feature:
    """The b12x MoE backend itself."""
    name = "b12x MoE backend"
    wanted = seen.settings.arm or seen.settings.compress or seen.serve.moe_backend == "b12x"
    if not seen.serve.given:
        return Feature(
            name, wanted, None, "no command line given", "add it: doctor -- vllm serve MODEL ..."
        )
    obstacles = backend(seen)
    if seen.serve.moe_backend == "auto":
        obstacles[0] = (
            "--moe-backend is auto, and vLLM never selects b12x by itself",
            obstacles[0][1],
        )
    elif seen.serve.moe_backend == "flashinfer_b12x":
        obstacles[0] = (
            "flashinfer_b12x is FlashInfer's own port, not the b12x package",
            obstacles[0][1],
        )
    if obstacles:
        return blocked(name, wanted, obstacles)
    if seen.gpu_ok is None:
        return Feature(name, wanted, None, "no GPU can be seen from here", ELSEWHERE)
    return Feature(name, wanted, True, f"--moe-backend b12x, {seen.provider.label}")
