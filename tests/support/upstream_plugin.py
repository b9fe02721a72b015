# SPDX-License-Identifier: Apache-2.0
"""pytest plugin for running vLLM's own tests on CPU, without their conftest (which needs a GPU machine's packages).

Gives the pretended SM120 platform and the two small fixtures of that conftest that the chosen tests use.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support import sm120

sm120.install()


@pytest.fixture
def default_vllm_config() -> Iterator[None]:
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        yield


@pytest.fixture
def dist_init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Real process groups of one rank, over gloo, in place of ``sm120.single_rank``'s stand-in."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    monkeypatch.setattr(parallel_state, "_TP", None)
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            backend="gloo",
            distributed_init_method=f"file://{tmp_path}/rendezvous",
        )
        parallel_state.initialize_model_parallel(1, 1)
        yield
        parallel_state.cleanup_dist_env_and_memory()
