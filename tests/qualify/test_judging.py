# SPDX-License-Identifier: Apache-2.0
"""What lines say and when they may decide: on made results, on two that are compared, and on a fake server's answers."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from b12x_overlay.qualify import statistics
from b12x_overlay.qualify.cli import main
from b12x_overlay.qualify.compare import join
from b12x_overlay.qualify.lines import judge
from b12x_overlay.qualify.report import html, markdown
from b12x_overlay.qualify.schema import Result
from b12x_overlay.qualify.settings import SingleThresholds
from qualify.fake_server import serving
from qualify.made_results import (
    ABILITIES,
    LENGTH,
    STREAMS,
    arm,
    block,
    decode,
    limits,
    line,
    made,
    needle,
    prefill,
    stated,
)

PREFILL, NEEDLE = f"ab.prefill.{LENGTH}", "ab.needle.difference"
EVEN = ((495, 500), (493, 500), (494, 500))
UNEVEN = ((500, 500), (500, 500), (470, 500))


def four(a: list, b: list, **fields) -> Result:
    """A B B A of prefill samples, the same in both blocks of a side."""
    sides = {"A": a, "B": b}
    return made(*(block(name, prefill=sides[name]) for name in "ABBA"), **fields)


# Confidence and limits


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.999])
def test_every_interval_has_the_configured_confidence(confidence):
    """Blocks of one side differ, so that the interval has a width."""
    rates = {"A": [[100.0, 102.0], [104.0, 103.0]], "B": [[110.0, 111.0], [113.0, 116.0]]}
    turns = {"A": iter(rates["A"]), "B": iter(rates["B"])}
    result = made(
        *(
            block(name, prefill=prefill(*(turn := next(turns[name]))), decode=decode(*turn), needle=needle((180, 200)))
            for name in "ABBA"
        ),
        thresholds=limits(confidence=confidence),
    )  # fmt: skip
    ratio = statistics.ratio(rates["A"], rates["B"], confidence)
    difference = statistics.share_difference((360, 400), (360, 400), confidence)
    share = statistics.share(360, 400, confidence)
    for name, expected in (
        (PREFILL, ratio),
        (f"ab.decode.{STREAMS}.tok_s", ratio),
        (NEEDLE, difference),
        ("a.needle.exact", share),
    ):
        found = line(result, name)
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high)), name
    assert f"{100 * confidence:g} %" in markdown(result)


def test_a_question_has_its_own_limits():
    parts = {
        "prefill": prefill(100.0, 100.0),
        "decode": decode(50.0, 50.0),
        "needle": needle(*EVEN),
    }

    def limit(name: str, question: str | None, **changes) -> str | None:
        return line(
            made(*(block(n, **parts) for n in "ABBA"), question=question, **changes), name
        ).limit

    shipped = limits()
    for question in (None, "a4", "csf", "prefetch"):
        asked = shipped.ratios(question)
        assert limit(NEEDLE, question) == f">= {asked.needle_difference_min:g}"
        assert limit(PREFILL, question) == f">= {asked.prefill_ratio_min:g}"
        assert limit(f"ab.decode.{STREAMS}.tok_s", question) == f">= {asked.decode_ratio_min:g}"
    assert limit(NEEDLE, "csf") != limit(NEEDLE, None)
    own = shipped.question["csf"].model_copy(update={"needle_difference_min": -0.5})
    changed = limits(question=dict(shipped.question) | {"csf": own})
    assert limit(NEEDLE, "csf", thresholds=changed) == ">= -0.5"


@pytest.mark.parametrize(
    ("exact", "verdict"), [(1500, "pass"), (1440, "fail"), (1455, "inconclusive")]
)
def test_a_single_server_must_reach_the_needle_limit(exact, verdict):
    """0.97 of 1500 is 1455; 0.96 is too few, although most are right."""
    counts = [(exact // 3, 500)] * 3
    found = line(made(block("A", needle=needle(*counts))), "needle.exact")
    assert (found.limit, found.verdict) == (">= 0.97", verdict)


def test_the_needle_limit_is_the_same_without_a_file():
    assert SingleThresholds().needle_exact_min == limits().single.needle_exact_min == 0.97


# Single blocks


def test_one_block_on_a_side_never_decides():
    """Repeats agree to a per mille; another run of the same server may still be several per cent off."""
    slow, fast, middle = (
        prefill(50.0, 50.1, 49.9),
        prefill(200.0, 200.1, 199.9),
        prefill(100.0, 100.1, 99.9),
    )
    for blocks in (
        [block("A", prefill=middle), block("B", prefill=slow)],
        [block("A", prefill=middle), block("B", prefill=fast)],
        [block("A", prefill=middle), block("B", prefill=fast), block("B", prefill=fast)],
        [block("A", prefill=middle), block("A", prefill=middle), block("B", prefill=slow)],
        [block("A", prefill=middle[:1]), block("B", prefill=slow[:1])],
    ):
        found = line(made(*blocks), PREFILL)
        assert found.verdict == "inconclusive"
        assert "--rounds 2 or more" in found.note
        assert "ab" in found.note
    assert line(four(middle, fast), PREFILL).verdict == "pass"
    assert line(four(middle, slow), PREFILL).verdict == "fail"
    assert line(four(middle, slow), PREFILL).note is None


def test_without_a_limit_one_block_is_no_verdict_either():
    blocks = [
        block(name, decode=decode(50.0, 51.0, steps_s=25.0, accepted_per_step=1.0)) for name in "AB"
    ]
    found = line(made(*blocks), f"ab.decode.{STREAMS}.tok_s")
    assert found.verdict == "info"
    assert "--rounds 2" in found.note
    assert "compare engine steps" in found.note


@pytest.mark.parametrize(("rounds", "verdict", "strict"), [(1, "inconclusive", 1), (2, "fail", 1)])
def test_compare_needs_two_rounds_of_each(qualify, tmp_path, rounds, verdict, strict):
    for name, rate in (("one", 100.0), ("two", 50.0)):
        store(
            tmp_path / name,
            made(*(block("A", prefill=prefill(rate, rate + 0.1)) for _ in range(rounds))),
        )
    done = qualify("compare", str(tmp_path / "one"), str(tmp_path / "two"), out="both")
    assert done.line(PREFILL)["verdict"] == verdict
    assert done.code == (0 if verdict == "inconclusive" else 1)
    assert ("--rounds 2 or more" in done.out) == (rounds == 1)
    again = qualify(
        "compare", str(tmp_path / "one"), str(tmp_path / "two"), "--strict", out="strict"
    )
    assert again.code == strict


def store(folder, result: Result):
    """Write *result* as scripts/qualify does."""
    folder.mkdir()
    (folder / "result.json").write_text(result.model_dump_json())
    return folder


def test_strict_makes_an_inconclusive_line_count(tmp_path, capsys):
    folder = store(
        tmp_path / "r", made(block("A", needle=needle((485, 500), (485, 500), (485, 500))))
    )
    assert main(["report", str(folder)]) == 0
    assert main(["report", str(folder), "--strict"]) == 1
    assert "verdict: inconclusive" in capsys.readouterr().out


# What an interval is made of


def test_the_sides_of_a_ratio_give_the_ratio():
    """Skewed repeats: the medians would say 1.0."""
    result = four(prefill(100.0, 100.0, 100.0), prefill(100.0, 100.0, 200.0))
    found = line(result, PREFILL)
    assert found.a == pytest.approx(100.0)
    assert found.b == pytest.approx(100 * 2 ** (1 / 3))
    assert found.value == pytest.approx(found.b / found.a)
    row = next(
        row
        for row in markdown(result).splitlines()
        if row.startswith("| prefill, 2,048 tokens, B / A")
    )
    assert [cell.strip() for cell in row.split("|")[2:5]] == ["100.0", "126.0", "1.260"]
    page = re.sub(r"<[^>]+>", " ", html(result)[html(result).index(f'id="{PREFILL}"') :])
    assert re.search(r"100\.0\s+126\.0\s+1\.260", page)
    for text in (markdown(result), html(result)):
        assert "geometric means that it divides" in text


def test_blocks_of_different_length_weigh_alike_in_a_side():
    blocks = [
        block("A", prefill=prefill(100.0)), block("A", prefill=prefill(200.0, 200.0, 200.0)),
        block("B", prefill=prefill(100.0)), block("B", prefill=prefill(100.0)),
    ]  # fmt: skip
    found = line(made(*blocks), PREFILL)
    assert found.a == pytest.approx(math.sqrt(100 * 200))
    assert found.value == pytest.approx(found.b / found.a)


def test_the_sides_of_single_blocks_are_their_geometric_means():
    found = line(
        made(block("A", prefill=prefill(1.0, 4.0)), block("B", prefill=prefill(3.0, 3.0, 24.0))),
        PREFILL,
    )
    assert (found.a, found.b) == pytest.approx((2.0, 6.0))
    assert found.value == pytest.approx(3.0)


def test_the_basis_of_every_interval_is_text_in_both_reports():
    one, two = prefill(100.0, 101.0), prefill(98.0, 99.0, 97.0)
    for result, basis in (
        (four(one, two), "t over 2 + 2 blocks"),
        (made(block("A", prefill=one), block("B", prefill=two)), "blind to run-to-run change"),
    ):
        visible = re.sub(r"<[^>]+>", " ", html(result))
        for text in (markdown(result), visible):
            assert basis in text
            assert f"median and range of {len(result.blocks)}" in text
    alone = made(block("A", prefill=one))
    for text in (markdown(alone), re.sub(r"<[^>]+>", " ", html(alone))):
        assert "median and range of 2" in text


# Needle answers that are not independent


def test_runs_that_differ_by_more_than_chance_do_not_decide():
    assert statistics.differ(UNEVEN) < 0.01 < statistics.differ(EVEN)
    steady, torn = needle(*EVEN), needle(*UNEVEN)
    for a, b in ((steady, torn), (torn, steady)):
        found = line(made(block("A", needle=a), block("B", needle=b)), NEEDLE)
        side = "A" if a is torn else "B"
        assert found.verdict == "inconclusive"
        assert f"runs of {side} differ by more than chance" in found.note
    # Fewer exact answers by far, but who knows of which run.
    found = line(
        made(block("A", needle=steady), block("B", needle=needle((500, 500), (0, 500)))), NEEDLE
    )
    assert found.verdict == "inconclusive"
    assert found.high < -0.3
    assert (
        line(made(block("A", needle=steady), block("B", needle=steady)), NEEDLE).verdict == "pass"
    )


def test_runs_that_differ_leave_a_single_server_open():
    good = needle((500, 500), (500, 500), (485, 500))
    found = line(made(block("A", needle=good)), "needle.exact")
    assert found.low > 0.97
    assert found.verdict == "inconclusive"
    assert "runs differ by more than chance (p = " in found.note
    assert "per run: 500 of 500, 500 of 500, 485 of 500" in found.note
    steady = line(made(block("A", needle=needle(*EVEN))), "needle.exact")
    assert steady.verdict == "pass"
    assert "chance" not in steady.note


@pytest.mark.parametrize(
    ("salt", "abilities", "caching", "decides"),
    [
        ("request", ABILITIES, None, True),
        ("run", ABILITIES, None, False),
        ("run", ABILITIES, "True", False),
        ("run", ABILITIES, "False", True),  # no cache, no shared prefill
        ("request", ABILITIES | {"extras": False}, None, False),
        ("request", ABILITIES | {"extras": False}, "False", True),
    ],
)
def test_answers_that_may_share_a_prefill_do_not_decide(salt, abilities, caching, decides):
    identity = stated(settings={} if caching is None else {"enable_prefix_caching": caching})
    arms = [arm(name, abilities=abilities, identity=identity) for name in "AB"]
    result = made(*(block(name, needle=needle(*EVEN)) for name in "AB"), arms=arms, salt=salt)
    found = line(result, NEEDLE)
    assert found.verdict == ("pass" if decides else "inconclusive")
    assert ("may share one prefill" in (found.note or "")) == (not decides)
    assert ("may share one prefill" in line(result, "a.needle.exact").note) == (not decides)


@pytest.mark.parametrize(("salt", "number"), [("request", 24), ("run", 2)])
def test_every_needle_request_has_a_salt_of_its_own_unless_told_otherwise(qualify, salt, number):
    with serving() as server:
        given = () if salt == "request" else ("--needle-salt", salt)
        done = qualify("run", server.url, "--only", "needle", "--needle-runs", "2", *given)
    assert done.result["plan"]["needle"]["salt"] == salt
    asked = [body["cache_salt"] for _, body in server.seen.requests if "tools" in body]
    assert len(asked) == 24
    assert len(set(asked)) == number


# Notes


@pytest.mark.parametrize(
    ("busy", "note"), [(0, None), (2, "the server had other requests in 2 of 3 repeats")]
)
def test_other_requests_during_prefill_are_noted(busy, note):
    samples = prefill(100.0, 101.0, 102.0)
    for sample in samples[:busy]:
        sample.busy = True
    assert line(made(block("A", prefill=samples)), f"prefill.{LENGTH}").note == note


@pytest.mark.parametrize(("share", "noted"), [(0.79, False), (0.81, True)])
def test_a_measuring_program_at_its_own_limit_is_noted(share, noted):
    samples = decode(100.0) + decode(101.0, client_busy=share)
    note = line(made(block("A", decode=samples)), f"decode.{STREAMS}.tok_s").note
    assert ("its own limit" in (note or "")) == noted


def single(model: str, status: str = "complete") -> Result:
    identity = stated().model_copy(update={"model": model})
    blocks = [block("A", prefill=prefill(100.0, 101.0)) for _ in range(2)]
    return made(*blocks, arms=[arm("A", identity=identity)], status=status)


def test_comparing_different_models_is_noted():
    assert join(single("m"), single("m")).notes == []
    result = join(single("org/one"), single("org/two"))
    judge(result)
    assert result.notes == ["different models: org/one and org/two"]
    for text in (markdown(result), html(result)):
        assert "different models: org/one and org/two" in text


@pytest.mark.parametrize(("a", "b", "notes"), [
    ("partial", "complete", ["A is a partial result"]),
    ("complete", "partial", ["B is a partial result"]),
    ("complete", "complete", []),
])  # fmt: skip
def test_comparing_a_partial_result_is_noted_and_does_not_pass(a, b, notes):
    result = join(single("m", a), single("m", b))
    judge(result)
    assert result.notes == notes
    assert result.verdict == ("incomplete" if notes else "pass")
    assert all(note in markdown(result) for note in notes)


def test_geometric_means_agree_with_scipy():
    from scipy import stats

    a, b = [[3.0, 5.0, 9.0], [4.0, 4.5, 8.0]], [[7.0, 2.0, 6.0], [9.0, 1.5, 3.0]]
    interval = statistics.ratio(a, b, 0.95)
    means = [stats.gmean(np.concatenate(side)) for side in (a, b)]
    assert interval.sides == pytest.approx(tuple(means))
    assert interval.undecided is None


def test_comparing_names_what_only_one_side_measured():
    more = made(block("A", prefill=prefill(100.0, 101.0), decode=decode(50.0)))
    for one, other in ((single("m"), more), (more, single("m"))):
        assert join(one, other).notes == ["decode is left out: only one side measured it"]
