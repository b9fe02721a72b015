# SPDX-License-Identifier: Apache-2.0
"""The switches: parsed once, never an exception, known to vLLM."""

from __future__ import annotations

import logging
from typing import Any

import pytest


@pytest.fixture
def settings(vllm_on_cpu: None) -> Any:
    from vllm.model_executor.layers.fused_moe.b12x_a4 import settings

    return settings


@pytest.mark.parametrize("value", ["1", "+1", "1536", " 8 ", "9" * 5000])
def test_greater_than_zero_arms(settings: Any, value: str) -> None:
    assert settings.parse_settings({settings.ARM: value}).enabled


@pytest.mark.parametrize("value", ["0", "-4", "", "  ", "-0", "+0", "-" + "9" * 5000])
def test_zero_negative_and_empty_are_off_without_a_word(
    settings: Any, a4_log: list[logging.LogRecord], value: str
) -> None:
    assert settings.parse_settings({settings.ARM: value}) == settings.A4Settings()
    assert not a4_log


@pytest.mark.parametrize(
    "value", ["1.5k", "true", "1e3", "tcp://x", "1_000", "½", "٣", "0x10", "1 2"]
)
def test_malformed_is_off_with_one_warning(
    settings: Any, a4_log: list[logging.LogRecord], value: str
) -> None:
    assert not settings.parse_settings({settings.ARM: value}).enabled
    (record,) = a4_log
    assert record.levelno == logging.WARNING
    assert settings.ARM in record.getMessage()
    assert repr(value) in record.getMessage()


@pytest.mark.parametrize("name", ["EAGER", "KEEP_PACKED"])
def test_flags(settings: Any, a4_log: list[logging.LogRecord], name: str) -> None:
    variable, attribute = getattr(settings, name), name.lower()

    def parsed(value: str, arm: str = "1") -> bool:
        return getattr(settings.parse_settings({settings.ARM: arm, variable: value}), attribute)

    assert parsed("1")
    assert parsed("true")
    assert not parsed("0")
    assert not parsed("")
    assert not parsed("1", arm="0"), "a flag alone changes nothing"
    assert not a4_log
    assert not parsed("maybe")
    assert len(a4_log) == 1


def test_parsed_once(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.get_settings.cache_clear()
    monkeypatch.setenv(settings.ARM, "1")
    assert settings.get_settings().enabled
    monkeypatch.setenv(settings.ARM, "0")
    assert settings.get_settings().enabled, (
        "a value that changes later must not split a model's layers"
    )
    settings.get_settings.cache_clear()


def test_registered_with_vllm(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray copies registered variables to its workers, and an unregistered VLLM_ name stops or warns at start."""
    from vllm import envs
    from vllm.platforms import current_platform
    from vllm.ray.ray_env import get_env_vars_to_copy

    for name in settings.VARIABLES:
        assert name in envs.environment_variables
        assert name in get_env_vars_to_copy()
        monkeypatch.setenv(name, "not a number")
        assert getattr(envs, name) == "not a number", "reading it must not raise"
    current_platform.validate_environ(hard_fail=True)


def test_not_in_the_compile_cache_key(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs

    before = envs.compile_factors()
    csf = ("COMPRESS", "SCALE_PREFETCH", "RAISE_MAIN_STREAM")
    for name in (*settings.VARIABLES, *(f"VLLM_B12X_CSF_{switch}" for switch in csf)):
        monkeypatch.setenv(name, "1")
    assert envs.compile_factors() == before
