# SPDX-License-Identifier: Apache-2.0
"""The rule itself: ranges from host arrays against a row-by-row reading of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import sm120

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def rule() -> Any:
    sm120.install()
    from vllm.v1.worker import moe_row_types

    return moe_row_types


@dataclass(frozen=True)
class Request:
    prompt: int
    computed: int
    scheduled: int
    drafts: int


def truth(requests: list[Request]) -> list[bool]:
    """Row by row, in the words of the rule: True where the row is a prefill row."""
    rows = []
    for request in requests:
        one_new_token_over_context = (
            request.scheduled - request.drafts == 1 and request.computed > 0
        )
        in_prompt = request.computed < request.prompt and not one_new_token_over_context
        for row in range(request.scheduled):
            is_draft = row >= request.scheduled - request.drafts
            rows.append(in_prompt and not is_draft)
    return rows


def ranges(
    rule: Any, requests: list[Request], num_tokens: int | None = None
) -> tuple[tuple[int, int], ...]:
    columns = {
        name: np.array([getattr(r, name) for r in requests], dtype=np.int32)
        for name in ("scheduled", "drafts", "computed", "prompt")
    }
    drafts = columns["drafts"] if columns["drafts"].any() else None
    return rule.prefill_ranges(
        columns["scheduled"], drafts, columns["computed"], columns["prompt"], num_tokens
    )


def cases() -> list[Any]:
    files = [
        json.loads((DATA / name).read_text(encoding="utf-8"))
        for name in ("steps.json", "preempted.json")
    ]
    return [pytest.param(case, id=case["name"]) for file in files for case in file]


@pytest.mark.parametrize("case", cases())
def test_recorded_steps(rule: Any, case: dict[str, Any]) -> None:
    requests = [Request(**request) for request in case["requests"]]
    found = ranges(rule, requests)
    assert found == tuple(tuple(pair) for pair in case["prefill_ranges"])
    if "query_start_loc" in case:
        assert np.cumsum([0] + [r.scheduled for r in requests]).tolist() == case["query_start_loc"]


lengths = st.integers(0, 40)
any_request = st.builds(
    lambda prompt, computed, new, drafts: Request(prompt, computed, new + drafts, drafts),
    prompt=st.integers(1, 30),
    computed=lengths,
    new=st.integers(1, 12),
    drafts=st.sampled_from([0, 0, 0, 1, 3, 7]),
)


@settings(max_examples=1500, deadline=None)
@given(requests=st.lists(any_request, min_size=1, max_size=24), padding=st.integers(0, 40))
def test_any_batch_equals_the_row_by_row_truth(
    rule: Any, requests: list[Request], padding: int
) -> None:
    num_tokens = sum(r.scheduled for r in requests)
    found = ranges(rule, requests)
    rows = np.zeros(num_tokens + padding, dtype=bool)
    for lo, hi in found:
        rows[lo:hi] = True
    assert rows.tolist() == truth(requests) + [False] * padding
    # Ordered, disjoint and merged: no range is empty and none touches the next.
    flat = [edge for pair in found for edge in pair]
    assert flat == sorted(set(flat))


@settings(max_examples=500, deadline=None)
@given(data=st.data(), requests=st.lists(any_request, min_size=1, max_size=24))
def test_drafts_dropped_on_the_device(
    rule: Any, data: st.DataObject, requests: list[Request]
) -> None:
    """Adaptive verification: requests with drafts lie first, and the host knows only how many drafts stay in all.

    Where a request with drafts lies then, the host does not know, so its rows are not called prefill.
    """
    requests.sort(key=lambda r: r.drafts == 0)
    kept = [data.draw(st.integers(0, r.drafts)) for r in requests]
    real = [
        Request(r.prompt, r.computed, r.scheduled - r.drafts + k, k)
        for r, k in zip(requests, kept, strict=True)
    ]
    num_tokens = sum(r.scheduled for r in real)
    dropped = num_tokens != sum(r.scheduled for r in requests)
    expected = [
        row and not (dropped and request.drafts)
        for request, now in zip(requests, real, strict=True)
        for row in truth([now])
    ]
    rows = [False] * num_tokens
    for lo, hi in ranges(rule, requests, num_tokens):
        assert 0 <= lo < hi <= num_tokens
        rows[lo:hi] = [True] * (hi - lo)
    assert rows == expected


@pytest.mark.parametrize("num_tokens", range(2, 9))
def test_a_prompt_of_one_token_gets_placeholder_drafts(rule: Any, num_tokens: int) -> None:
    """vLLM's scheduler pads a new one-token prompt to the size of a verification; three drafts each, some dropped."""
    verifying, new = Request(5, 9, 4, 3), Request(1, 0, 4, 3)
    found = ranges(rule, [verifying, new], num_tokens)
    assert found == (((4, 5),) if num_tokens == 8 else ())


def test_work_grows_with_prefill_requests_only(rule: Any) -> None:
    """A decode-only step ends at the first comparison: no cumulative sum, no loop over requests."""

    class Counted(np.ndarray):
        calls = 0

        def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
            Counted.calls += 1
            plain = [np.asarray(i) if isinstance(i, Counted) else i for i in inputs]
            return getattr(ufunc, method)(*plain, **kwargs)

    def counted(values: list[int]) -> Any:
        return np.array(values, dtype=np.int32).view(Counted)

    R = 256
    assert rule.prefill_ranges(counted([1] * R), None, counted([90] * R), counted([40] * R)) == ()
    assert Counted.calls == 1
