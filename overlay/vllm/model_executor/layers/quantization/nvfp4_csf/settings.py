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

RAISE_MAIN_STREAM = "VLLM_B12X_CSF_RAISE_MAIN_STREAM"
"""0: passes that prefetch stay on vLLM's main stream instead of one of higher priority. Default 1."""

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})

NO_SLEEP = "NVFP4-CSF: sleep level 2 would drop the compressed scales that captured CUDA graphs read: use sleep level 1."


@dataclass(frozen=True)
class CsfSettings:
    """The parsed switches."""

    compress: bool = False
    prefetch: bool = True
    raise_main_stream: bool = True


def parse_settings(environ: Mapping[str, str]) -> CsfSettings:
    """Parse the switches from *environ*; a malformed value is logged and counts as the default."""
    default = CsfSettings()
    return CsfSettings(
        _flag(environ, COMPRESS, default.compress),
        _flag(environ, PREFETCH, default.prefetch),
        _flag(environ, RAISE_MAIN_STREAM, default.raise_main_stream),
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
    return has_compressed_scales(vllm_config)


def has_compressed_scales(vllm_config: Any) -> bool:
    """Whether this server's configuration asks for compressed scales, by its checkpoint or its environment."""
    quant_config = getattr(vllm_config, "quant_config", None)
    return get_settings().compress or hasattr(quant_config, "nvfp4_csf")


def refuse_engine_sleep(level: int, vllm_config: Any) -> None:
    """Look at a sleep request before the engine pauses and drops its requests (`refusals.refuse_sleep` is the worker's).

    Raises:
        ValueError: for level 2 with compressed scales.
    """
    if level >= 2 and has_compressed_scales(vllm_config):
        raise ValueError(NO_SLEEP)


def _flag(environ: Mapping[str, str], name: str, default: bool) -> bool:
    text = environ.get(name, "").strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    if text:
        logger.warning("%s=%r is neither 0 nor 1: taken as %d.", name, text, default)
    return default
