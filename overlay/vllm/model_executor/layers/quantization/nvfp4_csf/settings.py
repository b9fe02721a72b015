# SPDX-License-Identifier: Apache-2.0
"""The environment variables of NVFP4-CSF, each parsed once per process; a malformed value means the default."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger

logger = init_logger(__name__)

COMPRESS = "VLLM_B12X_CSF_COMPRESS"
"""1: compress the expert scales of an ordinary ModelOpt NVFP4 checkpoint while it loads. Default 0."""

PREFETCH = "VLLM_B12X_CSF_SCALE_PREFETCH"
"""0: expand every layer's scales in line instead of ahead of time. Default 1."""

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True)
class CsfSettings:
    """The parsed switches."""

    compress: bool = False
    prefetch: bool = True


def parse_settings(environ: Mapping[str, str]) -> CsfSettings:
    """Parse the switches from *environ*; a malformed value is logged and counts as the default."""
    default = CsfSettings()
    return CsfSettings(
        _flag(environ, COMPRESS, default.compress), _flag(environ, PREFETCH, default.prefetch)
    )


@functools.cache
def get_settings() -> CsfSettings:
    """The switches of this process. Tests that change the environment call ``get_settings.cache_clear()``."""
    return parse_settings(os.environ)


def wants_prefetch(vllm_config: Any) -> bool:
    """Whether this server may expand scales ahead of time: prefetch on, and compressed scales in play."""
    settings = get_settings()
    if not settings.prefetch:
        return False
    return settings.compress or hasattr(getattr(vllm_config, "quant_config", None), "nvfp4_csf")


def _flag(environ: Mapping[str, str], name: str, default: bool) -> bool:
    text = environ.get(name, "").strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    if text:
        logger.warning("%s=%r is neither 0 nor 1: taken as %d.", name, text, default)
    return default
