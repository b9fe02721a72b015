# SPDX-License-Identifier: Apache-2.0
"""The loader's hook for :mod:`fused_moe.b12x_a4.report`.

A module of its own because ``fused_moe`` imports ``models.utils``, and that the model loader: imported from the
loader's top level, the report would close the circle for every model whose first import is not ``fused_moe``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def reported(process_weights: Callable[..., None]) -> Callable[..., None]:
    """Wrap the loader's ``process_weights_after_loading(model, model_config, target_device)``."""

    @functools.wraps(process_weights)
    def process_and_report(model: Any, model_config: Any, *args: Any, **kwargs: Any) -> None:
        from vllm.model_executor.layers.fused_moe.b12x_a4.report import load_and_report

        load_and_report(process_weights, model, model_config, *args, **kwargs)

    return process_and_report
