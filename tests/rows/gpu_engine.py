# SPDX-License-Identifier: Apache-2.0
"""A small engine with real b12x kernels: which rows of every step ran A4, decided from the MoE outputs.

``python -m rows.gpu_engine OUT.json SPEC.json`` serves one checkpoint in several ways on one model runner. The truth
comes from the scheduler's request states (``recorder.Recorder``), the modes from the outputs: after the run every
recorded call's input goes through the same layer once as pure W4A16 and once as pure A4, and each row belongs to the
result that it is nearer to. Recording copies tensors on the device and reads nothing, so it works under
VLLM_GPU_SYNC_CHECK=error; copies made during a capture are refreshed by every replay, so replayed steps are seen, too.

The spec: ``runner`` ("V1" or "V2"), ``folder`` for the checkpoint, ``sync_check`` (None, "warn" or "error"),
``breakable`` (whether PIECEWISE graphs are vLLM's breakable ones, which need no torch.compile) and ``ways``,
a dict of names to ``arm``, ``eager_switch``, ``keep_packed`` ``compiled`` (booleans) and
``cudagraph_mode`` (None: eager).
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from gpu import vllm_stubs

from rows import warming

PROMPT_LENGTHS = (5, 40, 3, 20, 60, 1, 33, 97)
STEP_ROWS = 64
GRAPH_ROWS = [1, 2, 4, 8, 16, 32, 64]


@dataclass
class Call:
    """One MoE call: its layer's experts, copies of its tensors, and what the rows should be."""

    experts: Any
    tensors: tuple[torch.Tensor, ...]
    """Activations, top-k weights, ids, output."""
    wanted: list[bool]
    replayed: bool


@dataclass
class MoECalls:
    """Copies of every armed layer's calls while a recorder is set."""

    recorder: Any = None
    calls: list[Call] = field(default_factory=list)
    captured: dict[int, list[tuple[Any, tuple[torch.Tensor, ...]]]] = field(default_factory=dict)
    """By rows: the copies that graphs of this size write."""
    in_step: int = 0

    def install(self) -> None:
        from vllm.model_executor.layers.fused_moe.b12x_a4.experts import DualPlanExperts

        apply = DualPlanExperts.apply

        def watched(experts: Any, **call: Any) -> None:
            inputs = tuple(call[n].clone() for n in ("hidden_states", "topk_weights", "topk_ids"))
            apply(experts, **call)
            tensors = (*inputs, call["output"].clone())
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                self.captured.setdefault(inputs[0].shape[0], []).append((experts, tensors))
            elif self.recorder is not None:
                self.in_step += 1
                self.calls.append(Call(experts, tensors, self.recorder.wanted(), False))

        DualPlanExperts.apply = watched

    def watch_steps(self, runner: Any) -> None:
        """Notice steps in which no MoE code ran, because a graph did."""
        execute = runner.execute_model

        def watched(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self.in_step = 0
            if self.recorder is not None:
                for copies in self.captured.values():
                    for _, tensors in copies:
                        tensors[3].fill_(float("nan"))
            result = execute(scheduler_output, *args, **kwargs)
            if self.recorder is not None and scheduler_output.total_num_scheduled_tokens:
                self.recorder.count_step()
                if not self.in_step:
                    self._take_replayed()
            return result

        runner.execute_model = watched

    def _take_replayed(self) -> None:
        wanted = self.recorder.wanted()
        rows = min((n for n in self.captured if n >= len(wanted)), default=0)
        for experts, tensors in self.captured.get(rows, ()):
            copies = tuple(tensor.clone() for tensor in tensors)
            self.calls.append(Call(experts, copies, wanted, True))


def make_recorder(llm: Any) -> Any:
    """A ``recorder.Recorder`` that leaves the kernels alone."""
    from rows import recorder

    class Recorder(recorder.Recorder):
        def wanted(self) -> list[bool]:
            step = self.steps[-1]
            batch = [step[name] for name in self.batch.req_ids()]
            return [kind for request in batch for kind in request.row_types()]

        def count_step(self) -> None:
            step = self.steps[-1]
            for request in step.values():
                for kind in recorder.kinds(request):
                    self.kinds[kind] = self.kinds.get(kind, 0) + 1
            types = self.wanted()
            if any(types) and not all(types):
                self.kinds["mixed step"] = self.kinds.get("mixed step", 0) + 1

    runner = runner_of(llm)
    watching = Recorder(
        SimpleNamespace(runner=lambda llm: runner, replace_launch=lambda launch: None)
    )
    watching.watch(llm)
    return watching


def runner_of(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


@torch.inference_mode()
def pure(experts: Any, tensors: tuple[torch.Tensor, ...], a4: bool) -> torch.Tensor:
    """One launch of one mode over all rows."""
    from vllm.model_executor.layers.fused_moe.b12x_a4.parts import Part, StepSplit

    x, weights, ids, out = tensors
    rows, topk = ids.shape
    scratch = torch.empty(experts._scratch_nbytes(rows, topk), dtype=torch.uint8, device=x.device)
    split = StepSplit(rows, (Part(0, rows, True),), rows) if a4 else None
    result = torch.empty_like(out)
    experts._run(split, scratch, x, weights, ids, result)
    return result


def judge(calls: list[Call]) -> dict[str, Any]:
    """Compare every call's modes with the truth (replayed: all W4A16); distances are relative, per row."""
    found: dict[str, Any] = {
        "eager_calls": 0, "replayed_calls": 0, "wrong_rows": 0, "a4_rows": 0, "w4a16_rows": 0,
        "replayed_prefill_rows": 0, "w4a16_bit_equal_rows": 0, "own": 0.0, "other": float("inf"),
        "finite": True, "first_wrong": None,
    }  # fmt: skip
    for call in calls:
        count = len(call.wanted)
        out = call.tensors[3]
        if call.replayed and bool(out.isnan().all()):
            continue  # a graph of this size that was not the one replayed
        results = [pure(call.experts, call.tensors, a4) for a4 in (False, True)]
        real = out[:count].double()
        distance = torch.stack(
            [
                (real - r[:count].double()).norm(dim=1) / r[:count].double().norm(dim=1)
                for r in results
            ]
        )
        own, nearest = distance.min(0)
        modes = (nearest == 1).tolist()
        wanted = [False] * count if call.replayed else call.wanted
        wrong = [row for row in range(count) if modes[row] != wanted[row]]
        if wrong and found["first_wrong"] is None:
            found["first_wrong"] = [call.wanted, modes, call.replayed, distance.tolist()]
        found["replayed_calls" if call.replayed else "eager_calls"] += 1
        found["replayed_prefill_rows"] += sum(call.wanted) if call.replayed else 0
        found["wrong_rows"] += len(wrong)
        found["a4_rows"] += sum(modes)
        found["w4a16_rows"] += count - sum(modes)
        found["w4a16_bit_equal_rows"] += int((distance[0] == 0).sum())
        found["own"] = max(found["own"], float(own.max()))
        found["other"] = min(found["other"], float(distance.max(0).values.min()))
        found["finite"] &= bool(out[:count].isfinite().all())
    return found


def serve(
    runner: str,
    folder: str,
    ways: dict[str, Any],
    sync_check: str | None = None,
    breakable: bool = False,
    device: str = "cuda",
) -> dict[str, Any]:
    """Serve in every way; a way that fails has its error instead of findings."""
    os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"] = str(int(breakable))
    set_up(runner, sync_check, device)
    from csf import checkpoints

    model = Path(folder) / "model"
    if not model.exists():
        checkpoints.write(model, mtp_layer=False)
    calls = MoECalls()
    calls.install()
    found: dict[str, Any] = {}
    for name, way in ways.items():
        start = time.monotonic()
        try:
            found[name] = serve_one(str(model), calls, device, **way)
        except Exception as error:
            import traceback

            traceback.print_exc()
            found[name] = {"error": f"{type(error).__name__}: {error}"[:2000]}
        found[name]["seconds"] = round(time.monotonic() - start, 1)
        print(f"{runner} {name}: {found[name]}", file=sys.stderr, flush=True)
    return found


def set_up(runner: str, sync_check: str | None = None, device: str = "cuda") -> None:
    """Set the environment of the process's engines and install the stand-ins, before vLLM is used."""
    os.environ.update(vllm_stubs.environment(v2=runner == "V2"))
    if sync_check:
        os.environ["VLLM_GPU_SYNC_CHECK"] = sync_check
    if device == "cpu":
        from support import cpu_engine

        cpu_engine.start_with_reference()
    else:
        import vllm  # noqa: F401 - the stand-ins replace parts of it

        vllm_stubs.install()
        warming.warm_up_on_any_device()


def make_llm(
    model: str,
    device: str,
    *,
    arm: bool = True,
    eager_switch: bool = False,
    keep_packed: bool = False,
    compilation: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """An ``LLM`` of *model* with the given switches; *compilation* None: eager. *options* go to ``LLM``."""
    from vllm import LLM
    from vllm.model_executor.layers.fused_moe.b12x_a4 import plans, settings
    from vllm.v1.worker import moe_row_types

    os.environ[settings.ARM] = str(int(arm))
    os.environ[settings.EAGER] = str(int(eager_switch))
    os.environ[settings.KEEP_PACKED] = str(int(keep_packed))
    settings.get_settings.cache_clear()
    moe_row_types.RowTyper.armed = False
    plans._shared.clear()
    if device != "cpu":
        compilation = {**(compilation or {}), "custom_ops": ["none"]}
        options = {
            "attention_config": {"backend": "TRITON_ATTN"},
            "gpu_memory_utilization": 0.1,
            "kv_cache_memory_bytes": 64 << 20,  # no profiling: other engines share the device
            **options,
        }
    native = {"rms_norm": "native", "fused_add_rms_norm": "native"}
    given = {
        "max_model_len": 256, "max_num_batched_tokens": STEP_ROWS, "max_num_seqs": 8, "num_gpu_blocks_override": 64, **options,
    }  # fmt: skip
    return LLM(
        model=model, skip_tokenizer_init=True, block_size=32, enable_prefix_caching=False, disable_log_stats=True, seed=0,
        enforce_eager="cudagraph_mode" not in (compilation or {}), compilation_config={"mode": 0, **(compilation or {})},
        kernel_config={"moe_backend": "b12x", "enable_flashinfer_autotune": False, "ir_op_priority": native}, **given,
    )  # fmt: skip


def serve_one(
    model: str,
    calls: MoECalls,
    device: str,
    cudagraph_mode: str | None = None,
    **switches: bool,
) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.model_executor.layers.fused_moe.b12x_a4 import counters
    from vllm.utils import gpu_sync_debug

    from rows import engine_cases

    calls.captured.clear()
    calls.calls.clear()
    compilation = None
    if cudagraph_mode:
        compilation = {"cudagraph_mode": cudagraph_mode, "cudagraph_capture_sizes": GRAPH_ROWS}
    llm = make_llm(model, device, compilation=compilation, **switches)
    runner = runner_of(llm)
    experts = [
        module.quant_method.moe_kernel.fused_experts
        for module in runner.model.modules()
        if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None
    ]
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": engine_cases.prompt(n, n)} for n in PROMPT_LENGTHS]

    def generate() -> list[list[int]]:
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    # The first round compiles Triton kernels; loading one waits for the device.
    checked = gpu_sync_debug._sync_check_enabled
    gpu_sync_debug._sync_check_enabled = False
    generate()
    gpu_sync_debug._sync_check_enabled = checked
    recorder = make_recorder(llm)
    calls.watch_steps(runner)
    calls.recorder = recorder
    before = counters.snapshot()
    tokens = generate()
    calls.recorder = None
    after = counters.snapshot()
    wanted = [request.row_types() for step in recorder.steps for request in step.values()]
    result = {
        "runner": recorder.batch.name,
        "classes": sorted({type(e).__name__ for e in experts}),
        "layers": len(experts),
        "packed": sum(getattr(e, "_packed_experts", None) is not None for e in experts),
        "row_typer": runner.moe_row_typer is not None,
        "steps": len(recorder.steps),
        "rows": sum(map(len, wanted)),
        "prefill_rows": sum(map(sum, wanted)),
        "kinds": recorder.kinds,
        "sync_checked": checked,
        "graphs": {rows: len(copies) for rows, copies in calls.captured.items()},
        "counters": {key: after[key] - before[key] for key in after},
        "tokens": tokens,
        **judge(calls.calls),
    }
    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
    return result


if __name__ == "__main__":
    _spec = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    Path(sys.argv[1]).write_text(json.dumps(serve(**_spec), indent=1), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # exit handlers wait for things that the stand-ins do not have
