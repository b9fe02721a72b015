# SPDX-License-Identifier: Apache-2.0
"""The intervals against scipy, published figures and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from b12x_overlay.qualify import statistics
from b12x_overlay.qualify.schema import VerdictKind
from b12x_overlay.qualify.verdict import at_least
from scipy import stats

# R. G. Newcombe, Statistics in Medicine 17 (1998) 873-890, table II, method 10 (hybrid score), 95 %.
NEWCOMBE = [
    ((56, 70), (48, 80), 0.0524, 0.3339),
    ((9, 10), (3, 10), 0.1705, 0.8090),
    ((6, 7), (2, 7), 0.0582, 0.8062),
    ((5, 56), (0, 29), -0.0381, 0.1926),
    ((0, 10), (0, 20), -0.1611, 0.2775),
    ((0, 10), (0, 10), -0.2775, 0.2775),
    ((10, 10), (0, 20), 0.6791, 1.0000),
    ((10, 10), (0, 10), 0.6075, 1.0000),
]


@pytest.mark.parametrize(("first", "second", "low", "high"), NEWCOMBE)
def test_share_difference_gives_newcombes_published_intervals(first, second, low, high):
    """His difference is first minus second; ours is b minus a."""
    interval = statistics.share_difference(second, first, 0.95)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=5e-5)


def test_share_difference_covers_at_shares_near_one():
    """492 and 495 of 500: the interval must hold the true difference about as often as it says."""
    rng = np.random.default_rng(7)
    p, q, n = 0.985, 0.99, 500
    hits = 0
    trials = 2000
    for a, b in zip(rng.binomial(n, p, trials), rng.binomial(n, q, trials), strict=True):
        interval = statistics.share_difference((int(a), n), (int(b), n), 0.95)
        hits += interval.low <= q - p <= interval.high
    assert 0.935 < hits / trials < 0.975


def test_492_against_495_is_no_difference():
    interval = statistics.share_difference((492, 500), (495, 500), 0.95)
    assert interval.low < 0 < interval.high
    clear = statistics.share_difference((940, 1000), (999, 1000), 0.95)
    assert clear.low > 0.04


@pytest.mark.parametrize(("successes", "total"), [(0, 10), (10, 10), (492, 500), (1, 3)])
def test_share_is_wilsons_interval(successes, total):
    """Wilson's formula written out."""
    z = stats.norm.ppf(0.975)
    p = successes / total
    middle = (p + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(p * (1 - p) / total + z * z / (4 * total**2))
    interval = statistics.share(successes, total, 0.95)
    assert (interval.low, interval.high) == pytest.approx((middle - half, middle + half), abs=1e-12)


def test_ratio_of_blocks_is_the_pooled_t_interval_of_block_means():
    a = [[100.0, 104.0, 99.0], [97.0, 98.0, 101.0]]
    b = [[108.0, 110.0, 109.0], [112.0, 107.0, 108.0]]
    means_a = [np.mean(np.log(block)) for block in a]
    means_b = [np.mean(np.log(block)) for block in b]
    difference = np.mean(means_b) - np.mean(means_a)
    pooled = (np.var(means_a, ddof=1) + np.var(means_b, ddof=1)) / 2
    half = stats.t.ppf(0.975, 2) * math.sqrt(pooled * (1 / 2 + 1 / 2))
    interval = statistics.ratio(a, b, 0.95)
    assert interval is not None
    assert interval.value == pytest.approx(math.exp(difference))
    assert (interval.low, interval.high) == pytest.approx(
        (math.exp(difference - half), math.exp(difference + half))
    )


def test_ratio_covers_although_repeats_of_a_block_move_together():
    """Blocks differ by more than their repeats: an interval over the repeats would be far too narrow."""
    rng = np.random.default_rng(3)
    hits = narrow = 0
    trials = 1500
    for _ in range(trials):
        blocks = [
            [math.exp(shift + noise) for noise in rng.normal(0, 0.002, 5)]
            for shift in rng.normal(0, 0.02, 4)
        ]
        a, b = [blocks[0], blocks[3]], [blocks[1], blocks[2]]
        interval = statistics.ratio(a, b, 0.95)
        hits += interval.low <= 1.0 <= interval.high
        single = statistics.ratio([a[0] + a[1]], [b[0] + b[1]], 0.95)
        narrow += single.low <= 1.0 <= single.high
    assert 0.93 < hits / trials < 0.97
    assert narrow / trials < 0.5


def test_ratio_takes_out_a_drift_that_runs_through_a_b_b_a():
    """A server that cools or heats by 1 % per block: the order cancels it in the value."""
    speeds = [100 * 0.99**turn for turn in range(4)]
    interval = statistics.ratio(
        [[speeds[0]] * 3, [speeds[3]] * 3], [[speeds[1]] * 3, [speeds[2]] * 3], 0.95
    )
    assert interval.value == pytest.approx(1.0, abs=1e-12)


def test_ratio_of_single_blocks_is_welchs_interval():
    a, b = [10.0, 11.0, 10.5, 10.7], [12.0, 12.5, 11.9]
    bounds = stats.ttest_ind(np.log(b), np.log(a), equal_var=False).confidence_interval(0.9)
    interval = statistics.ratio([a], [b], 0.9)
    assert (interval.low, interval.high) == pytest.approx(
        (math.exp(bounds.low), math.exp(bounds.high))
    )
    assert "blind to run-to-run change" in interval.basis


def test_ratio_without_enough_data():
    assert statistics.ratio([], [[1.0]], 0.95) is None
    assert statistics.ratio([[]], [[1.0]], 0.95) is None
    lonely = statistics.ratio([[2.0]], [[1.0]], 0.95)
    assert (lonely.value, lonely.low, lonely.high) == (0.5, None, None)
    same = statistics.ratio([[2.0, 2.0]], [[2.0, 2.0]], 0.95)
    assert (same.low, same.high) == (1.0, 1.0)


def test_differ_is_the_chi_square_test_and_knows_when_to_be_silent():
    counts = [(495, 500), (490, 500), (470, 500)]
    table = [[495, 490, 470], [5, 10, 30]]
    assert statistics.differ(counts) == pytest.approx(
        stats.chi2_contingency(table, correction=False).pvalue
    )
    assert statistics.differ([(5, 5), (5, 5)]) is None
    assert statistics.differ([(5, 9)]) is None
    assert statistics.differ([(0, 5), (0, 7)]) is None


def test_spread_is_numpys():
    values = [5.0, 1.0, 4.0, 2.0]
    spread = statistics.spread(values)
    assert spread.median == np.median(values)
    assert (spread.low, spread.high, spread.count) == (1.0, 5.0, 4)
    assert spread.quartiles == tuple(np.percentile(values, [25, 75]))


@pytest.mark.parametrize(
    ("low", "high", "limit", "verdict"),
    [
        (0.98, 1.02, 0.97, VerdictKind.PASS),
        (0.97, 1.02, 0.97, VerdictKind.PASS),
        (0.96, 1.02, 0.97, VerdictKind.INCONCLUSIVE),
        (0.90, 0.969, 0.97, VerdictKind.FAIL),
        (0.90, 0.97, 0.97, VerdictKind.INCONCLUSIVE),
        (None, None, 0.97, VerdictKind.INCONCLUSIVE),
        (0.1, 0.2, None, VerdictKind.INFO),
    ],
)
def test_the_whole_interval_decides(low, high, limit, verdict):
    value = 1.0 if low is None else (low + high) / 2
    line = at_least("x", "x", "ratio", statistics.Interval(value, low, high, ""), limit)
    assert line.verdict == verdict


def test_one_value_below_the_limit_without_an_interval_fails():
    line = at_least("x", "x", "ratio", statistics.Interval(0.5, None, None, ""), 0.97)
    assert line.verdict == VerdictKind.FAIL
