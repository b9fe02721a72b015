# SPDX-License-Identifier: Apache-2.0
"""Intervals: medians with spread, ratios of rates, shares and their differences. scipy computes; this arranges."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

ONE_BLOCK = (
    "one block on a side cannot tell a change from the difference between two runs: measure each with --rounds 2 or more, "
    "or both with ab"
)


@dataclass(frozen=True)
class Interval:
    """A figure with its confidence interval; the bounds are None where the data cannot give them."""

    value: float
    low: float | None
    high: float | None
    basis: str
    undecided: str | None = None
    """Why the interval may not decide about a limit although it has bounds; None: it may."""
    sides: tuple[float, float] | None = None
    """Of a ratio: what it divides, A first."""


@dataclass(frozen=True)
class Spread:
    """Median and spread of repeats."""

    count: int
    median: float
    low: float
    """Smallest value."""
    high: float
    """Largest value."""
    quartiles: tuple[float, float]


def spread(values: Sequence[float]) -> Spread:
    """Median, extremes and quartiles of at least one value."""
    quarter, median, three = (float(value) for value in np.percentile(values, [25, 50, 75]))
    return Spread(len(values), median, min(values), max(values), (quarter, three))


def share(successes: int, total: int, confidence: float) -> Interval:
    """A share with Wilson's score interval (scipy)."""
    result = stats.binomtest(successes, total).proportion_ci(
        confidence_level=confidence, method="wilson"
    )
    return Interval(
        successes / total, float(result.low), float(result.high), f"Wilson, {successes} of {total}"
    )


def share_difference(a: tuple[int, int], b: tuple[int, int], confidence: float) -> Interval:
    """Share of *b* minus share of *a* (successes, total), with Newcombe's hybrid score interval.

    R. G. Newcombe, Statistics in Medicine 17 (1998) 873-890, method 10: the two Wilson intervals combined. It stays
    sensible at shares near 1, where a difference of normal approximations collapses to zero width.
    """
    first, second = share(*a, confidence), share(*b, confidence)
    assert (
        first.low is not None
        and first.high is not None
        and second.low is not None
        and second.high is not None
    )
    value = second.value - first.value
    low = value - math.hypot(second.value - second.low, first.high - first.value)
    high = value + math.hypot(second.high - second.value, first.value - first.low)
    return Interval(value, low, high, f"Newcombe, {a[0]} of {a[1]} against {b[0]} of {b[1]}")


def differ(counts: Sequence[tuple[int, int]]) -> float | None:
    """p value that runs (successes, total) have one common share; None where nothing can be said.

    Chi-square test of homogeneity (scipy). A small value means that runs differ by more than chance, so an interval
    over all answers together is too narrow.
    """
    table = np.array([(successes, total - successes) for successes, total in counts], dtype=float).T
    table = table[:, table.sum(axis=0) > 0]
    if table.shape[1] < 2 or (table.sum(axis=1) == 0).any():
        return None
    return float(stats.chi2_contingency(table, correction=False).pvalue)


def ratio(
    a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], confidence: float
) -> Interval | None:
    """B over A for rates measured in blocks (one inner sequence per block); None if either side is empty.

    Repeats inside a block share the block's state (clocks, temperature, caches), so with two or more blocks per side
    the block is the unit: a pooled t interval over the blocks' mean logarithms (A B B A has 2 degrees of freedom).
    With fewer, Welch's t interval over the single repeats, which cannot see the difference between runs: it says so
    and is undecided. The sides are the geometric means that the ratio is made of: of the block means, or of the
    repeats.
    """
    blocks_a = [np.log(block) for block in a if len(block)]
    blocks_b = [np.log(block) for block in b if len(block)]
    if not blocks_a or not blocks_b:
        return None
    if len(blocks_a) >= 2 and len(blocks_b) >= 2:
        left, right = np.array([x.mean() for x in blocks_a]), np.array([x.mean() for x in blocks_b])
        basis = f"t over {len(left)} + {len(right)} blocks"
        undecided, equal = None, True
    else:
        left, right = np.concatenate(blocks_a), np.concatenate(blocks_b)
        basis = f"Welch over {len(left)} + {len(right)} repeats of single blocks; blind to run-to-run change"
        undecided, equal = ONE_BLOCK, False
    sides = float(math.exp(left.mean())), float(math.exp(right.mean()))
    value = sides[1] / sides[0]

    def interval(low: float | None, high: float | None, basis: str) -> Interval:
        return Interval(value, low, high, basis, undecided, sides)

    if len(left) < 2 or len(right) < 2:
        return interval(None, None, "one repeat on a side: no interval")
    if np.ptp(left) == 0 and np.ptp(right) == 0:
        return interval(value, value, basis)
    with warnings.catch_warnings():
        # Nearly equal blocks make scipy warn of lost digits; the interval is then narrow, which is right.
        warnings.simplefilter("ignore", RuntimeWarning)
        bounds = stats.ttest_ind(right, left, equal_var=equal).confidence_interval(confidence)
    return interval(float(math.exp(bounds.low)), float(math.exp(bounds.high)), basis)
