# SPDX-License-Identifier: Apache-2.0
"""Were block scales really kept compressed, and expanded ahead of time? One line per arm.

The overlay logs once per model what it has compressed; that is the proof. Where no log can be read, the settings that
the running server states (``/server_info``) are taken, or a doctor report made beside it. The variables given to
--restart are no evidence: a compose file or a script need not forward them.
"""

from __future__ import annotations

from collections.abc import Mapping

from b12x_overlay.qualify.activity import Evidence, Promise, activity_line, is_restarted
from b12x_overlay.qualify.promises import QUESTIONS
from b12x_overlay.qualify.schema import Arm, Identity, Line, Result

COMPRESS = QUESTIONS["csf"].variable
PREFETCH = QUESTIONS["prefetch"].variable

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_METHOD = "nvfp4_csf"
_COMPRESSIBLE = frozenset({"modelopt", "modelopt_fp4", "modelopt_mixed", "deepseek_v4_fp8"})
"""Quantizations whose MoE layers the overlay can compress while loading."""
_SERVER, _DOCTOR = "/server_info", "b12x-overlay-doctor/1"
_HOW = "give --server-log, or start the server with VLLM_SERVER_DEV_MODE=1 so that it states its settings"


def csf_lines(result: Result) -> list[Line]:
    """The lines of an A/B about CSF; of another run those for which there is something to say."""
    lines = [_compressed(result, arm) for arm in result.arms]
    if result.question == "prefetch":
        lines += [_ahead(result, arm) for arm in result.arms]
    return [line for line in lines if line is not None]


def _compressed(result: Result, arm: Arm) -> Line | None:
    asked = result.question in ("csf", "prefetch")
    wanted: bool | None = None
    if asked:
        wanted = result.question == "prefetch" or arm.name == "B"
    elif _is_on(_given(arm), COMPRESS, default=False):
        wanted = True
    evidence = _logged(arm, wanted) or _by_settings(result, arm)
    if wanted is None and evidence is not None and not evidence.active:
        return None  # nobody asked for it, and it is not there
    promise = Promise(
        "csf.active", "block scales compressed", wanted, f"nothing says whether CSF ran: {_HOW}"
    )
    return activity_line(result, arm, promise, evidence, asked=asked)


def _ahead(result: Result, arm: Arm) -> Line | None:
    identity = _trusted(result, arm)
    evidence = None
    if identity is not None:
        on = _is_on(identity.environment, PREFETCH, default=True)
        evidence = Evidence(on, _basis(identity), f"{PREFETCH} is {'on' if on else 'off'}")
    promise = Promise(
        "csf.prefetch", "scale prefetch on", arm.name == "B",
        "nothing says how the server was started: start it with VLLM_SERVER_DEV_MODE=1 so that it states its settings",
    )  # fmt: skip
    return activity_line(result, arm, promise, evidence, asked=True)


def _logged(arm: Arm, wanted: bool | None) -> Evidence | None:
    if arm.csf_log is None:
        return None
    if arm.csf_log == "mixed":
        note = "after some starts it logged compressed scales, after others none"
        return Evidence(wanted is False, "the server's log", note)  # not what is wanted either way
    on = arm.csf_log == "on"
    return Evidence(
        on, "the server's log", "compressed block scales logged" if on else "none logged"
    )


def _by_settings(result: Result, arm: Arm) -> Evidence | None:
    identity = _trusted(result, arm)
    if identity is None:
        return None
    method = identity.settings.get("quantization")
    if method == _METHOD:
        return Evidence(True, _basis(identity), f"quantization {_METHOD}")
    if _SERVER not in identity.sources and "NVFP4-CSF" in identity.manifest.get("active", []):
        return Evidence(True, _basis(identity), "NVFP4-CSF active")
    if not _is_on(identity.environment, COMPRESS, default=False):
        note = f"{COMPRESS} is off (a checkpoint that is stored compressed shows in the log only)"
        return Evidence(False, _basis(identity), note)
    if method in _COMPRESSIBLE:
        return Evidence(True, _basis(identity), f"{COMPRESS} is on, quantization {method}")
    return None  # switched on for a model of which nobody knows whether it can be compressed


def _trusted(result: Result, arm: Arm) -> Identity | None:
    """The identity, if what it says of variables is about this very server.

    A doctor report is a file that was made once, so it says nothing of a server that is restarted for every block.
    """
    identity = arm.identity
    if identity is None:
        return None
    if _SERVER in identity.sources:
        return identity
    return identity if _DOCTOR in identity.sources and not is_restarted(result) else None


def _basis(identity: Identity) -> str:
    return "the server's settings" if _SERVER in identity.sources else "the doctor's report"


def _given(arm: Arm) -> dict[str, str]:
    """What the server was to be started with, as far as anybody says."""
    return (arm.identity.environment if arm.identity else {}) | arm.restart_environment


def _is_on(environment: Mapping[str, str], name: str, *, default: bool) -> bool:
    """As the overlay parses it: a malformed value means the default."""
    value = environment.get(name, "").strip().lower()
    return value in _TRUE or (default and value not in _FALSE)
