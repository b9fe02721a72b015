# SPDX-License-Identifier: Apache-2.0
"""Who gets a row typer, which configurations are refused, and what the forward context carries."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import sm120

ARM = "B12X_W4A16_A4_PREFILL_MIN_TOKENS"
EAGER = "VLLM_B12X_A4_PREFILL_EAGER"


@pytest.fixture
def row_types(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, with the switches read anew and a process that has an armed layer."""
    sm120.install()
    from vllm.model_executor.layers.fused_moe.b12x_a4.settings import get_settings
    from vllm.v1.worker import moe_row_types

    monkeypatch.setenv(ARM, "1")
    monkeypatch.setattr(moe_row_types.RowTyper, "armed", False)
    monkeypatch.setattr(moe_row_types.RowTyper, "runs_a4", False)
    moe_row_types.note_armed_layer()
    get_settings.cache_clear()
    yield moe_row_types
    get_settings.cache_clear()


def config(parallel: dict[str, Any] | None = None, cache: dict[str, Any] | None = None) -> Any:
    from vllm.config import CacheConfig, ParallelConfig, VllmConfig

    return VllmConfig(
        parallel_config=ParallelConfig(**(parallel or {})),
        cache_config=CacheConfig(**(cache or {})),
    )


@pytest.mark.parametrize("value", [None, "", "0", "-4", "1.5k", "true"])
def test_no_typer_unless_asked_for(
    row_types: Any, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv(ARM)
    else:
        monkeypatch.setenv(ARM, value)
    monkeypatch.setenv(EAGER, "1")
    assert row_types.make_row_typer(config()) is None


@pytest.mark.parametrize("value", ["1", "1536"])
def test_typer_when_asked_for(row_types: Any, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(ARM, value)
    assert row_types.make_row_typer(config()) is not None


def _refused(
    row_types: Any, caplog: pytest.LogCaptureFixture, vllm_config: Any, words: str
) -> None:
    logging.getLogger("vllm").addHandler(caplog.handler)
    try:
        assert row_types.make_row_typer(vllm_config) is None
    finally:
        logging.getLogger("vllm").removeHandler(caplog.handler)
    assert words in caplog.text
    assert ARM in caplog.text


@pytest.mark.parametrize(
    ("switches", "words"),
    [
        ({"data_parallel_size": 2}, "data parallelism"),
        ({"prefill_context_parallel_size": 2}, "prefill context parallelism"),
        (
            {
                "enable_expert_parallel": True,
                "tensor_parallel_size": 2,
                "data_parallel_size": 2,
                "all2all_backend": "allgather_reducescatter",
            },
            "sequence-parallel MoE",
        ),
        ({"enable_dbo": True}, "microbatches"),
        ({"ubatch_size": 2}, "microbatches"),
    ],
    ids=["DP", "PCP", "SP-MoE", "DBO", "ubatch"],
)
def test_parallelism_is_refused(
    row_types: Any, caplog: pytest.LogCaptureFixture, switches: dict[str, Any], words: str
) -> None:
    real = config()
    for name, value in switches.items():  # building such a config needs as many devices
        setattr(real.parallel_config, name, value)
    _refused(row_types, caplog, real, words)


def test_kv_sharing_fast_prefill_is_refused(
    row_types: Any, caplog: pytest.LogCaptureFixture
) -> None:
    _refused(
        row_types, caplog, config(cache={"kv_sharing_fast_prefill": True}), "KV-sharing layers"
    )


@pytest.mark.parametrize(
    ("architecture", "v2", "bounded", "refused"),
    [
        ("DeepseekV41ForCausalLM", True, True, True),
        ("DeepseekV41ForCausalLM", True, False, False),
        ("DeepseekV41ForCausalLM", False, True, False),
        ("Glm5MoeForCausalLM", True, True, False),
    ],
)
def test_decoder_replay_is_refused(
    row_types: Any,
    caplog: pytest.LogCaptureFixture,
    architecture: str,
    v2: bool,
    bounded: bool,
    refused: bool,
) -> None:
    """The cache option is on by default; only DeepSeek-V4.1 on the V2 runner has replay layers."""
    real = config(cache={"swa_bounded_replay": bounded})
    vllm_config = SimpleNamespace(
        parallel_config=real.parallel_config,
        cache_config=real.cache_config,
        model_config=SimpleNamespace(architectures=[architecture]),
        use_v2_model_runner=v2,
    )
    if refused:
        _refused(row_types, caplog, vllm_config, "decoder replay")
    else:
        assert row_types.make_row_typer(vllm_config) is not None


def test_replay_layers_are_in_deepseek_v41_only() -> None:
    """The refusal goes by the architecture's name; another user of the replay layers must be added there."""
    from support.paths import site

    users = {
        path.relative_to(site("stock")).parts[2]
        for path in (site("stock") / "vllm").rglob("*.py")
        if "DecoderReplayLayers(" in path.read_text(encoding="utf-8")
    }
    assert users == {"deepseek_v41"}


def test_only_the_two_runners_give_row_types() -> None:
    """Every other forward (drafters, dummy runs, encoders) sets its context without them."""
    from support.paths import site

    givers = {
        str(path.relative_to(site("patched") / "vllm"))
        for path in (site("patched") / "vllm").rglob("*.py")
        if "moe_row_types=" in path.read_text(encoding="utf-8")
    }
    assert givers == {
        "forward_context.py",
        "v1/worker/gpu_model_runner.py",
        "v1/worker/gpu/model_runner.py",
    }


def v1_batch(computed: list[int], prompt: list[int]) -> Any:
    class Unreadable:
        """A device tensor: any use of it fails."""

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"device tensor touched: {name}")

    return SimpleNamespace(
        num_reqs=len(prompt),
        req_ids=[str(i) for i in range(len(prompt))],
        num_computed_tokens_cpu=np.array([*computed, 0, 0], dtype=np.int32),
        num_prompt_tokens=np.array(
            [*prompt, 99, 99], dtype=np.int32
        ),  # beyond num_reqs: free slots
        num_computed_tokens=Unreadable(),
        token_ids=Unreadable(),
    )


def test_context_carries_the_ranges(row_types: Any) -> None:
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import get_forward_context, set_forward_context

    typer = row_types.make_row_typer(config())
    output = SimpleNamespace(scheduled_spec_decode_tokens={"0": [7, 7, 7]})
    step = typer.step_v1(
        v1_batch([44, 10, 0], [40, 40, 9]), np.array([4, 20, 9], dtype=np.int32), output
    )
    found = row_types.row_types_of(step, 40, CUDAGraphMode.NONE)
    assert found == row_types.MoERowTypes(40, ((4, 33),))
    with set_forward_context(None, config(), num_tokens=40, moe_row_types=found):
        assert get_forward_context().moe_row_types is found
        with set_forward_context(None, config(), num_tokens=3):  # as drafters do
            assert get_forward_context().moe_row_types is None


def test_decode_only_step_carries_nothing(row_types: Any) -> None:
    from vllm.config import CUDAGraphMode

    typer = row_types.make_row_typer(config())
    output = SimpleNamespace(scheduled_spec_decode_tokens={})
    step = typer.step_v1(v1_batch([44, 41], [40, 40]), np.array([1, 1], dtype=np.int32), output)
    assert step is None
    assert row_types.row_types_of(step, 8, CUDAGraphMode.FULL) is None


def test_graph_steps_are_counted(row_types: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import CUDAGraphMode

    counted: list[Any] = []
    monkeypatch.setattr(row_types, "_count_graph_step", counted.append)
    step = row_types.StepRows(((0, 5),), False)
    assert not row_types.must_run_eager(step)
    for mode in (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL):
        row_types.row_types_of(step, 8, mode)
    assert counted == [row_types.MoERowTypes(8, ((0, 5),))] * 2


@pytest.mark.parametrize("eager", [False, True])
def test_eager_switch(row_types: Any, monkeypatch: pytest.MonkeyPatch, eager: bool) -> None:
    monkeypatch.setenv(EAGER, str(int(eager)))
    typer = row_types.make_row_typer(config())
    output = SimpleNamespace(scheduled_spec_decode_tokens={})
    prefill = typer.step_v1(v1_batch([0], [40]), np.array([20], dtype=np.int32), output)
    decode = typer.step_v1(v1_batch([40], [40]), np.array([1], dtype=np.int32), output)
    assert row_types.must_run_eager(prefill) is eager
    assert row_types.must_run_eager(decode) is False


def test_only_a4_layers_give_up_graphs_and_count_rows(
    row_types: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose layers only prefetch scales has row types, and no precision that depends on graphs."""
    from vllm.config import CUDAGraphMode
    from vllm.model_executor.layers.fused_moe.b12x_a4 import counters

    monkeypatch.setenv(EAGER, "1")
    monkeypatch.setattr(row_types.RowTyper, "armed", False)
    monkeypatch.setattr(row_types.RowTyper, "runs_a4", False)
    counted: list[Any] = []
    monkeypatch.setattr(counters, "count_graph_step", counted.append)
    typer = row_types.make_row_typer(config())

    def graph_step() -> Any:
        output = SimpleNamespace(scheduled_spec_decode_tokens={})
        step = typer.step_v1(v1_batch([0], [40]), np.array([20], dtype=np.int32), output)
        assert row_types.row_types_of(step, 24, CUDAGraphMode.FULL).prefill == ((0, 20),)
        return step

    row_types.note_armed_layer(runs_a4=False)
    assert not row_types.must_run_eager(graph_step())
    assert not counted
    row_types.note_armed_layer()
    row_types.note_armed_layer(runs_a4=False)
    assert row_types.must_run_eager(graph_step())
    assert len(counted) == 1
