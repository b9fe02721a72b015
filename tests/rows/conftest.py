# SPDX-License-Identifier: Apache-2.0
"""vLLM on a pretended SM120 in this process, the switches, and the reference b12x."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def vllm_on_cpu() -> None:
    import torch
    from support import sm120

    torch.set_num_threads(1)  # the tensors are tiny; more threads only wait for each other
    sm120.install()


@pytest.fixture
def switches(vllm_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """``switches(arm="1", eager="1", keep_packed="1", force_a16="1")``: set the variables as a server's start would."""
    from vllm.model_executor.layers.fused_moe.b12x_a4 import settings

    names = {
        "arm": settings.ARM,
        "eager": settings.EAGER,
        "keep_packed": settings.KEEP_PACKED,
        "fork": settings.FORK_SWITCH,
        "force_a16": "VLLM_B12X_MOE_FP4_FORCE_A16",
    }

    def set_switches(**values: str | None) -> None:
        for short, name in names.items():
            value = values.get(short)
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        settings.get_settings.cache_clear()

    set_switches()
    yield set_switches
    monkeypatch.undo()
    settings.get_settings.cache_clear()


@pytest.fixture
def armed(switches: Callable[..., None]) -> None:
    """A4 prefill asked for, and W4A16 forced: the switches of a serving command that arms a calibrated checkpoint."""
    switches(arm="1", force_a16="1")


@pytest.fixture
def reference(vllm_on_cpu: None) -> Iterator[Any]:
    """The reference b12x instead of the real one, for one test."""
    import vllm.utils.b12x as accessors
    from support import reference_b12x
    from vllm.model_executor.layers.fused_moe.b12x_a4 import plans, provider

    real = accessors._B12X_SUBMODULES["b12x.moe.fused_moe"]
    yield reference_b12x.install()
    accessors._B12X_SUBMODULES["b12x.moe.fused_moe"] = real
    provider.get_provider.cache_clear()
    plans._shared.clear()


@pytest.fixture
def a4_log(vllm_on_cpu: None) -> Iterator[list[logging.LogRecord]]:
    """What the A4 package logs; vLLM's loggers do not reach pytest's caplog."""
    records: list[logging.LogRecord] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler = Collect()
    logger = logging.getLogger("vllm.model_executor.layers.fused_moe.b12x_a4")
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)
    logger.setLevel(level)
