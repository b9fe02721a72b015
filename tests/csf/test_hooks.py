# SPDX-License-Identifier: Apache-2.0
"""The patched places of vLLM around a pass: forward context, model runner's row types, sleep."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from csf.method_support import loaded
from csf.recording import RecordingStreams


@pytest.fixture
def model(csf) -> SimpleNamespace:
    """Two compressed layers that have settled their order."""
    layers = [loaded(csf, "compress", number) for number in range(2)]
    order = csf.scope.scales_of(layers[0].nvfp4_csf).owner
    rows = 24  # 48 ids for 4 experts: every expert is expanded
    batch = csf.harness.make_batch(rows, csf.layers.SMALL)
    return SimpleNamespace(csf=csf, layers=layers, order=order, rows=rows, batch=batch)


def step(model: Any, prefill: bool = True) -> Any:
    return model.csf.harness.step(model.rows, [(0, model.rows)] if prefill else [])


def call(model: Any, number: int) -> torch.Tensor:
    return model.csf.harness.call(model.layers[number], model.batch)


def test_the_next_layer_of_the_same_pass_finds_its_scales(model) -> None:
    alone = [call(model, number) for number in range(2)]
    before = model.order.prefetched
    with step(model):
        together = [call(model, number) for number in range(2)]
    assert model.order.prefetched == before + 1
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_a_closing_context_joins_what_is_pending(model) -> None:
    with step(model):
        call(model, 0)
        assert model.order.pending
    assert not model.order.pending
    before = model.order.prefetched
    call(model, 1)
    assert model.order.prefetched == before


def test_an_exception_joins_it_too(model) -> None:
    with pytest.raises(RuntimeError, match="layer 1"), step(model):
        call(model, 0)
        assert model.order.pending
        raise RuntimeError("layer 1")
    assert not model.order.pending


def test_passes_without_prefill_rows_prefetch_nothing(model) -> None:
    with model.csf.harness.step(None):
        call(model, 0)
        assert not model.order.pending


@pytest.mark.parametrize("switch", ["0", "1"])
def test_the_main_stream_is_raised_by_its_switch(csf, monkeypatch, switch: str) -> None:
    from vllm import envs
    from vllm.model_executor.layers.quantization.nvfp4_csf import owner, settings

    monkeypatch.setenv(settings.RAISE_MAIN_STREAM, switch)
    settings.get_settings.cache_clear()
    streams = RecordingStreams()
    monkeypatch.setattr(owner, "stream_ops", lambda device: streams)
    layer = loaded(csf, "compress").nvfp4_csf
    scratch = csf.scope.scales_of(layer).owner
    rows = envs.VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD + 1
    usual = streams.main()
    with csf.harness.step(rows, [(0, rows)]):
        assert (streams.main() != usual) == (switch == "1")
    assert streams.main() == usual
    assert not scratch.pending


def test_an_opening_context_is_announced_to_the_target_only(model) -> None:
    entered = []
    model.order.enter = entered.append
    with step(model):
        assert len(entered) == 1
        assert entered[0].moe_row_types.num_rows == model.rows
    model.csf.owner._open.clear()
    with model.csf.owner.owner_scope(is_draft=True):
        draft = model.csf.layers.load(
            model.csf.layers.make_streams(5),
            model.csf.layers.as_streams(model.csf.layers.checkpoint_tensors()),
        )
    model.csf.owner._open.append(model.csf.scope)
    draft.nvfp4_csf.owner.scales_of(draft.nvfp4_csf)
    with step(model):
        assert len(entered) == 2


def test_a_collected_model_is_not_announced_to(vllm) -> None:
    import gc
    import weakref

    from vllm import forward_context
    from vllm.model_executor.layers.quantization.nvfp4_csf import owner

    class Order:
        def enter(self, context: Any) -> None:
            raise AssertionError("gone")

    order = Order()
    opens = owner._entering(weakref.ref(order))
    del order
    gc.collect()
    opens(forward_context)


@pytest.mark.parametrize(
    ("prefetch", "compress", "from_csf", "wanted"),
    [
        ("1", "0", False, False),
        ("1", "1", False, True),
        ("1", "0", True, True),
        ("0", "1", True, False),
    ],
)
def test_row_types_are_computed_where_the_prefetch_needs_them(
    vllm, monkeypatch, prefetch: str, compress: str, from_csf: bool, wanted: bool
) -> None:
    """With A4 prefill off, too."""
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.fused_moe.b12x_a4 import settings as a4_settings
    from vllm.model_executor.layers.quantization.nvfp4_csf import settings
    from vllm.v1.worker import moe_row_types

    monkeypatch.delenv("B12X_W4A16_A4_PREFILL_MIN_TOKENS", raising=False)
    monkeypatch.setenv(settings.PREFETCH, prefetch)
    monkeypatch.setenv(settings.COMPRESS, compress)
    a4_settings.get_settings.cache_clear()
    settings.get_settings.cache_clear()
    config = VllmConfig()
    object.__setattr__(
        config, "quant_config", SimpleNamespace(**({"nvfp4_csf": 1} if from_csf else {}))
    )
    typer = moe_row_types.make_row_typer(config)
    settings.get_settings.cache_clear()
    assert (typer is not None) == wanted
    if typer is not None:
        assert not moe_row_types.must_run_eager(typer._step(((0, 4),)))


def test_the_workers_sleep_asks_first(vllm, monkeypatch) -> None:
    from vllm.model_executor.layers.quantization.nvfp4_csf import refusals
    from vllm.v1.worker.gpu_worker import Worker

    asked = []

    class AskedError(Exception):
        pass

    def refuse(level: int, *models: Any) -> None:
        asked.append((level, models))
        raise AskedError

    monkeypatch.setattr(refusals, "refuse_sleep", refuse)
    worker = Worker.__new__(Worker)
    worker.model_runner = SimpleNamespace(model="target")
    monkeypatch.setattr(Worker, "get_draft_model", lambda self: "draft")
    with pytest.raises(AskedError):
        worker.sleep(2)
    assert asked == [(2, ("target", "draft"))]
