# SPDX-License-Identifier: Apache-2.0
"""Sizes for people, in the server's log and the converter's lines."""

from __future__ import annotations

_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "KB"))


def readable(nbytes: int) -> str:
    """*nbytes* in the largest unit (powers of 1000, GB at most) of which there is at least one."""
    for unit, name in _UNITS:
        rounded = round(nbytes / unit, 3)
        if abs(rounded) >= 1:
            return f"{rounded:.3f} {name}"
    return f"{nbytes} B"
