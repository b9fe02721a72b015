# SPDX-License-Identifier: Apache-2.0
"""Every feature, asked for or not, in README's order."""

from __future__ import annotations

from b12x_overlay.doctor import a4, csf
from b12x_overlay.doctor.features import Seen, backend_feature
from b12x_overlay.doctor.findings import Feature


def evaluate(seen: Seen) -> list[Feature]:
    """The rows of the report."""
    return [
        backend_feature(seen),
        a4.feature(seen),
        a4.eager(seen),
        a4.keep_packed(seen),
        csf.feature(seen),
        csf.prefetch(seen),
    ]
