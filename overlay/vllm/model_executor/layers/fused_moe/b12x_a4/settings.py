# SPDX-License-Identifier: Apache-2.0
"""The environment variables of A4 prefill, each parsed once per process.

The variables are read at the first call of :func:`get_settings` and never again, so that no forward pass parses an
environment and a value that changes later cannot split the layers of one model. A malformed value means the default,
with one warning; it never raises.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from vllm.logger import init_logger

logger = init_logger(__name__)

ARM = "B12X_W4A16_A4_PREFILL_MIN_TOKENS"
"""Greater than 0 arms A4 prefill. Only "> 0" matters: the value is no threshold."""

EAGER = "VLLM_B12X_A4_PREFILL_EAGER"
"""1: a step with prefill rows bypasses CUDA graphs, so that step size never decides a prompt's precision."""

KEEP_PACKED = "VLLM_B12X_A4_KEEP_PACKED"
"""1: armed layers also hold the packed W4A16 weights, and W4A16 rows stay on the packed kernels."""

FORK_SWITCH = "B12X_W4A16_A4_PREFILL"
"""The 0/1 switch of b12x builds whose ``bind`` takes ``a4_prefill``. :mod:`provider` maps or refuses it."""

VARIABLES = (ARM, EAGER, KEEP_PACKED)
"""What ``vllm/envs.py`` registers for this package."""

_INTEGER = re.compile(r"[+-]?[0-9]+")
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off", ""})


@dataclass(frozen=True)
class A4Settings:
    """The parsed switches.

    Attributes:
        enabled: the user asked for A4 prefill. Whether a layer is armed is decided per layer at load.
        eager: steps with prefill rows are dispatched without CUDA graphs; False unless ``enabled``.
        keep_packed: packed and native weights side by side; False unless ``enabled``.
    """

    enabled: bool = False
    eager: bool = False
    keep_packed: bool = False


def parse_settings(environ: Mapping[str, str]) -> A4Settings:
    """Parse the switches from *environ*; malformed values are logged once each and count as the default."""
    enabled = _parse_positive(environ, ARM)
    eager = _parse_flag(environ, EAGER)
    keep_packed = _parse_flag(environ, KEEP_PACKED)
    return A4Settings(enabled, enabled and eager, enabled and keep_packed)


@functools.cache
def get_settings() -> A4Settings:
    """The switches of this process. Tests that change the environment call ``get_settings.cache_clear()``."""
    return parse_settings(os.environ)


def _parse_positive(environ: Mapping[str, str], name: str) -> bool:
    text = environ.get(name, "").strip()
    if not text:
        return False
    if _INTEGER.fullmatch(text) is None:
        logger.warning(
            "%s=%r is not an integer: A4 prefill stays off. Set %s=1 to arm it, or unset it.",
            name,
            text,
            name,
        )
        return False
    # Not int(text): Python refuses to convert more than 4,300 digits.
    return text[0] != "-" and text.strip("+0") != ""


def _parse_flag(environ: Mapping[str, str], name: str) -> bool:
    text = environ.get(name, "").strip().lower()
    if text in _TRUE:
        return True
    if text not in _FALSE:
        logger.warning("%s=%r is neither 0 nor 1: taken as 0.", name, text)
    return False
