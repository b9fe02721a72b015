# SPDX-License-Identifier: Apache-2.0
"""The environment variables that decide what is active, parsed as the server parses them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from b12x_overlay.doctor import packages
from b12x_overlay.doctor.findings import Finding, Level

ARM = "B12X_W4A16_A4_PREFILL_MIN_TOKENS"
EAGER = "VLLM_B12X_A4_PREFILL_EAGER"
KEEP_PACKED = "VLLM_B12X_A4_KEEP_PACKED"
COMPRESS = "VLLM_B12X_CSF_COMPRESS"
PREFETCH = "VLLM_B12X_CSF_SCALE_PREFETCH"
RAISE_MAIN_STREAM = "VLLM_B12X_CSF_RAISE_MAIN_STREAM"
FORCE_A16 = "VLLM_B12X_MOE_FP4_FORCE_A16"
FORK_SWITCH = "B12X_W4A16_A4_PREFILL"
OURS = (ARM, EAGER, KEEP_PACKED, COMPRESS, PREFETCH, RAISE_MAIN_STREAM)

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off", ""})
_INTEGER = re.compile(r"[+-]?[0-9]+")


@dataclass(frozen=True)
class Settings:
    """The parsed variables.

    Attributes:
        arm: A4 prefill is asked for (:data:`ARM` is an integer above 0).
        eager, keep_packed, compress, prefetch, raise_main_stream: the switches of that name.
        force_a16: upstream's W4A16 switch; None if upstream cannot parse it and will not start.
        given: the variables of interest that are set, as they are set.
    """

    arm: bool
    eager: bool
    keep_packed: bool
    compress: bool
    prefetch: bool
    raise_main_stream: bool
    force_a16: bool | None
    given: dict[str, str]


def read(
    environ: Mapping[str, str], registered: frozenset[str] = frozenset()
) -> tuple[Settings, list[Finding]]:
    """Parse *environ*; malformed and unknown values come back as findings.

    *registered* are the names that the installed vllm knows, see :func:`registered_in_vllm`; empty: unknown.
    """
    found: list[Finding] = []
    settings = Settings(
        arm=_positive(environ, ARM, found),
        eager=_flag(environ, EAGER, False, found),
        keep_packed=_flag(environ, KEEP_PACKED, False, found),
        compress=_flag(environ, COMPRESS, False, found),
        prefetch=_flag(environ, PREFETCH, True, found),
        raise_main_stream=_flag(environ, RAISE_MAIN_STREAM, True, found),
        force_a16=_force_a16(environ, found),
        given={name: environ[name] for name in (*OURS, FORCE_A16, FORK_SWITCH) if name in environ},
    )
    if not settings.arm:
        for name in (EAGER, KEEP_PACKED):
            if environ.get(name, "").strip().lower() in _TRUE:
                text = f"{name} has no effect while {ARM} is not above 0"
                found.append(Finding("settings", Level.WARNING, text, f"set {ARM}=1"))
    if FORK_SWITCH in environ:
        text = f"{FORK_SWITCH} is the switch of b12x builds that take a4_prefill; this project's switch is {ARM}"
        found.append(Finding("settings", Level.NOTE, text, f"set {ARM}=1 (on) or unset it (off)"))
    found += _unknown(environ, registered)
    return settings, found


def _positive(environ: Mapping[str, str], name: str, found: list[Finding]) -> bool:
    text = environ.get(name, "").strip()
    if not text:
        return False
    if _INTEGER.fullmatch(text) is None:
        what = f"{name}={text!r} is not an integer: A4 prefill stays off"
        found.append(Finding("settings", Level.PROBLEM, what, f"set {name}=1, or unset it"))
        return False
    return text[0] != "-" and text.strip("+0") != ""  # as the server: no limit on digits


def _flag(environ: Mapping[str, str], name: str, default: bool, found: list[Finding]) -> bool:
    text = environ.get(name, "").strip().lower()
    if name not in environ or not text:
        return default
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    what = f"{name}={text!r} is neither 0 nor 1: taken as {int(default)}"
    found.append(Finding("settings", Level.PROBLEM, what, f"set {name}=1 or {name}=0"))
    return default


def _force_a16(environ: Mapping[str, str], found: list[Finding]) -> bool | None:
    """As vllm/envs.py reads it: ``bool(int(...))``, which takes no words."""
    text = environ.get(FORCE_A16, "0")
    try:
        return bool(int(text))
    except ValueError:
        what = f"{FORCE_A16}={text!r}: vLLM reads it with int() and stops with a ValueError"
        found.append(
            Finding("settings", Level.PROBLEM, what, f"set {FORCE_A16}=1 or {FORCE_A16}=0")
        )
        return None


def _unknown(environ: Mapping[str, str], registered: frozenset[str]) -> list[Finding]:
    """Names that look like ours but are not, and names that the installed vllm has not registered."""
    found = []
    known = {*OURS, FORCE_A16, FORK_SWITCH}
    for name in sorted(environ):
        close = difflib.get_close_matches(name, [*OURS, FORCE_A16], n=1, cutoff=0.85)
        if name in known:
            if name.startswith("VLLM_") and registered and name not in registered:
                text = f"{name} is set, and the vllm installed here does not know it"
                found.append(Finding("settings", Level.WARNING, text, "run the patched vllm"))
        elif close and name not in registered:
            text = f"{name} is no variable of this project or of vllm"
            found.append(Finding("settings", Level.PROBLEM, text, f"did you mean {close[0]}?"))
    return found


def registered_in_vllm() -> frozenset[str]:
    """The names in the installed ``vllm/envs.py``, empty without vllm; vLLM warns of any other VLLM_ name."""
    folder = packages.package_folder("vllm")
    try:
        text = (folder / "envs.py").read_text(encoding="utf-8", errors="replace") if folder else ""
    except OSError:
        return frozenset()
    return frozenset(re.findall(r'^\s*"([A-Z][A-Z0-9_]+)"\s*:', text, re.MULTILINE))
