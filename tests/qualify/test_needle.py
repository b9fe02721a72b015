# SPDX-License-Identifier: Apache-2.0
"""The needle task: what it contains, that it is reproducible, how answers are scored."""

from __future__ import annotations

import json
import re

import pytest
from b12x_overlay.qualify.faults import Fault
from b12x_overlay.qualify.needle import TOOL, make_task
from b12x_overlay.qualify.schema import NeedleOutcome
from b12x_overlay.qualify.scoring import score
from b12x_overlay.qualify.settings import NeedlePlan
from hypothesis import given, settings
from hypothesis import strategies as st


def test_the_same_plan_gives_the_same_task_and_another_seed_another():
    plan = NeedlePlan()
    assert make_task(plan) == make_task(plan)
    assert make_task(plan) != make_task(plan, 1)
    assert make_task(plan).facts != make_task(NeedlePlan(task_seed="other")).facts


@settings(deadline=None)
@given(
    records=st.integers(0, 60),
    facts=st.integers(1, 16),
    seed=st.text("abc/ é", min_size=1, max_size=8),
    positions=st.lists(st.floats(0, 1), min_size=16, max_size=16),
)
def test_every_fact_stands_once_in_the_text_among_all_records(records, facts, seed, positions):
    plan = NeedlePlan(
        records=records, facts=facts, task_seed=seed, fact_positions=tuple(positions[:facts])
    )
    task = make_task(plan)
    notes = dict(
        re.findall(r"^NOTE the certified reading of (\w+) is (\d+)\.$", task.prompt, re.MULTILINE)
    )
    assert {name.lower(): int(value) for name, value in notes.items()} == task.facts
    assert (
        len(re.findall(r"^\d{5} unit [0-9a-f]{12} load \d{5} steady$", task.prompt, re.MULTILINE))
        == records
    )
    assert task.checksum == sum(k * v for k, v in enumerate(task.facts.values(), 1))


def test_positions_are_where_they_are_asked_for():
    task = make_task(NeedlePlan(records=100, facts=3, fact_positions=(1.0, 0.0, 0.5)))
    body = [line for line in task.prompt.splitlines() if re.match(r"\d{5} unit|NOTE", line)]
    places = {
        line.split()[5].lower(): index for index, line in enumerate(body) if line.startswith("NOTE")
    }
    names = list(task.facts)
    assert (places[names[1]], places[names[2]], places[names[0]]) == (0, 51, 102)


def test_the_prompt_names_the_weights_and_the_tool_takes_exactly_the_facts():
    task = make_task(NeedlePlan())
    formula = " + ".join(f"{weight} x {name.upper()}" for weight, name in enumerate(task.facts, 1))
    assert f"CHECKSUM = {formula}" in task.prompt
    parameters = task.tool()["function"]["parameters"]
    assert parameters["required"] == [*task.facts, "checksum"]
    assert parameters["additionalProperties"] is False


TASK = make_task(NeedlePlan(records=5))
RIGHT = {**TASK.facts, "checksum": TASK.checksum}
FIRST = next(iter(TASK.facts))


def answer(
    values=None, *, arguments=None, calls=1, name=TOOL, content=None, finish="tool_calls", **message
):
    text = json.dumps(RIGHT if values is None else values) if arguments is None else arguments
    call = {"function": {"name": name, "arguments": text}}
    return {
        "choices": [
            {
                "finish_reason": finish,
                "message": {"content": content, "tool_calls": [call] * calls, **message},
            }
        ]
    }


CASES = [
    (answer(), "EXACT"),
    (answer(content="\n \n"), "EXACT"),
    (answer(finish="stop"), "EXACT"),
    (answer(reasoning_content="long thoughts"), "EXACT"),
    (answer(RIGHT | {"checksum": TASK.checksum - 2}), "NEAR_MISS"),
    (answer(RIGHT | {"checksum": TASK.checksum + 2}), "NEAR_MISS"),
    (answer(RIGHT | {"checksum": TASK.checksum + 3}), "WRONG_SUM"),
    (answer(RIGHT | {FIRST: RIGHT[FIRST] + 1}), "WRONG_FACTS"),
    (answer(RIGHT | {FIRST: RIGHT[FIRST] + 1, "checksum": TASK.checksum + 1}), "WRONG_FACTS"),
    (answer(RIGHT | {"checksum": str(TASK.checksum)}), "FAIL"),
    (answer(RIGHT | {"checksum": float(TASK.checksum)}), "FAIL"),
    (answer(RIGHT | {"checksum": True}), "FAIL"),
    (answer(RIGHT | {"checksum": None}), "FAIL"),
    (answer(RIGHT | {"more": 1}), "FAIL"),
    (answer(TASK.facts), "FAIL"),
    (answer(arguments="{"), "FAIL"),
    (answer(arguments="[1]"), "FAIL"),
    (answer(arguments=""), "FAIL"),
    (answer(arguments=17), "FAIL"),
    (answer(calls=0), "FAIL"),
    (answer(calls=2), "FAIL"),
    (answer(name="other"), "FAIL"),
    (answer(content="The sum is right."), "FAIL"),
    (answer(tool_calls=None), "FAIL"),
    (answer(tool_calls="x"), "FAIL"),
    (answer(tool_calls=["x"]), "FAIL"),
    (answer(finish="length"), "TRUNC"),
    (answer(finish="length", calls=0), "TRUNC"),
]


@pytest.mark.parametrize(("given_answer", "outcome"), CASES)
def test_score(given_answer, outcome):
    kind, why = score(given_answer, TASK, near=2)
    assert kind == NeedleOutcome(outcome)
    assert (why is None) == (outcome == "EXACT")


@pytest.mark.parametrize(
    "body", [{}, {"choices": []}, {"choices": [1]}, {"choices": [{"message": "x"}]}]
)
def test_what_is_no_chat_completion_is_a_fault(body):
    with pytest.raises(Fault):
        score(body, TASK, near=2)
