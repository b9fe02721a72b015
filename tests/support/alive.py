# SPDX-License-Identifier: Apache-2.0
"""What is still held, for tests of memory that should be given back."""

from __future__ import annotations

import gc
from collections.abc import Collection

import torch


def distinct_tensors(sizes: Collection[int]) -> int:
    """How many memory places hold a tensor of one of *sizes* elements, in this process."""
    gc.collect()
    found = (o for o in gc.get_objects() if isinstance(o, torch.Tensor) and not o.is_meta)
    return len({tensor.data_ptr() for tensor in found if tensor.numel() in sizes})
