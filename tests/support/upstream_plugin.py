# SPDX-License-Identifier: Apache-2.0
"""pytest plugin for running vLLM's own tests on CPU, without their conftest (which needs a GPU machine's packages).

Gives the pretended SM120 platform and the one small fixture of that conftest that tests which can run here use, and
writes every test's outcome to the file that $UPSTREAM_OUTCOMES names: ``{node id: [outcome, reason]}``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import sm120

sm120.install()

_outcomes: dict[str, tuple[str, str]] = {}


@pytest.fixture
def default_vllm_config() -> Iterator[None]:
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        yield


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        reason = report.longrepr
        text = reason[2] if isinstance(reason, tuple) else str(reason or "")
        _outcomes[report.nodeid] = (report.outcome, text.strip()[-2000:])


def pytest_sessionfinish() -> None:
    Path(os.environ["UPSTREAM_OUTCOMES"]).write_text(json.dumps(_outcomes), encoding="utf-8")
