# SPDX-License-Identifier: Apache-2.0
"""The few array operations where numpy and torch differ, so that the codec is written once for both.

Exception words are unsigned 32-bit. torch stores that type but hardly computes with it, hence all arithmetic on
words and positions is done in int64 on both sides; `to_words` and `from_words` convert.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

Array = Any
"""A numpy array or a torch tensor. One call never mixes the two."""

WINDOW = 16
LAST_BASE = 256 - WINDOW


class Backend(Protocol):
    """What the codec needs beyond indexing, reshaping and operators."""

    def is_bytes(self, array: Array) -> bool: ...
    def is_words(self, array: Array) -> bool: ...
    def contiguous(self, array: Array) -> Array: ...
    def zeros(self, shape: tuple[int, ...], like: Array) -> Array: ...
    def full(self, shape: tuple[int, ...], value: int, like: Array) -> Array: ...
    def cat(self, arrays: list[Array], axis: int) -> Array: ...
    def where_true(self, mask: Array) -> Array: ...
    def bytes_to_int64(self, array: Array) -> Array: ...
    def int64_to_bytes(self, array: Array) -> Array: ...
    def to_words(self, values: Array) -> Array: ...
    def from_words(self, words: Array) -> Array: ...
    def pairs_to_nibbles(self, codes: Array) -> Array: ...
    def best_bases(self, rows: Array) -> Array: ...
    def first(self, indices: Array) -> int | None: ...


class NumpyBackend:
    """numpy arrays in host memory."""

    def is_bytes(self, array: Array) -> bool:
        return bool(array.dtype == np.uint8)

    def is_words(self, array: Array) -> bool:
        return bool(array.dtype == np.dtype("<u4"))

    def contiguous(self, array: Array) -> Array:
        return np.ascontiguousarray(array)

    def zeros(self, shape: tuple[int, ...], like: Array) -> Array:
        return np.zeros(shape, np.uint8)

    def full(self, shape: tuple[int, ...], value: int, like: Array) -> Array:
        return np.full(shape, value, np.uint8)

    def cat(self, arrays: list[Array], axis: int) -> Array:
        return np.concatenate(arrays, axis)

    def where_true(self, mask: Array) -> Array:
        return np.flatnonzero(mask)

    def bytes_to_int64(self, array: Array) -> Array:
        return array.astype(np.int64)

    def int64_to_bytes(self, array: Array) -> Array:
        return array.astype(np.uint8)

    def to_words(self, values: Array) -> Array:
        return values.astype("<u4")

    def from_words(self, words: Array) -> Array:
        return words.astype(np.int64)

    def pairs_to_nibbles(self, codes: Array) -> Array:
        # Two codes below 16 as one little-endian 16-bit number: low | high << 8. Shifting by four brings the high
        # one beside the low one; the cast keeps the low byte.
        pairs = codes.view("<u2")
        return (pairs | (pairs >> 4)).astype(np.uint8)

    def best_bases(self, rows: Array) -> Array:
        """Lowest base per row whose window holds the most bytes; uint8 ``[R, C]`` to uint8 ``[R]``."""
        bases = np.empty(rows.shape[0], np.uint8)
        # About 64 Ki bytes at a time: the 8-byte histogram keys of one part then stay in the second-level cache.
        step = max(16, (1 << 16) // rows.shape[1])
        for start in range(0, rows.shape[0], step):
            part = rows[start : start + step]
            low, high = part.min(axis=1), part.max(axis=1)
            result = np.maximum(high, WINDOW - 1) - np.uint8(WINDOW - 1)
            # Rows that fit one window are done: its lowest base is the largest byte minus 15. The others count.
            wide = np.flatnonzero(high - low >= WINDOW)
            if len(wide):
                result[wide] = _most_frequent_window(part[wide])
            bases[start : start + step] = result
        return bases

    def first(self, indices: Array) -> int | None:
        return int(indices[0]) if len(indices) else None


def _most_frequent_window(rows: Array) -> Array:
    low, high = int(rows.min()), int(rows.max())
    span = high - low + 1
    count = rows.shape[0]
    # Histogram laid out [value, row], so that the sums over a window run along the slow axis. WINDOW - 1 empty
    # values on either side stand for windows that hang over the occupied range.
    keys = rows.astype(np.int64)
    keys -= low
    keys *= count
    keys += np.arange(count)[:, None]
    histogram = np.bincount(keys.ravel(), minlength=span * count).reshape(span, count)
    first_base, last_base = max(0, low - WINDOW + 1), min(high, LAST_BASE)
    total = np.zeros((last_base - first_base + WINDOW + 1, count), np.int32)
    filled = low - first_base + 1
    room = total.shape[0] - filled
    np.cumsum(histogram[:room], axis=0, out=total[filled : filled + span])
    total[filled + span :] = total[min(filled + span, total.shape[0]) - 1]
    held = total[WINDOW:] - total[:-WINDOW]
    return (held.argmax(axis=0) + first_base).astype(np.uint8)


class TorchBackend:
    """torch tensors on any device. torch is imported by whoever made the tensor."""

    def __init__(self) -> None:
        import torch

        self._torch: Any = torch

    def is_bytes(self, array: Array) -> bool:
        return bool(array.dtype == self._torch.uint8)

    def is_words(self, array: Array) -> bool:
        return bool(array.dtype == self._torch.uint32)

    def contiguous(self, array: Array) -> Array:
        return array.contiguous()

    def zeros(self, shape: tuple[int, ...], like: Array) -> Array:
        return self._torch.zeros(shape, dtype=self._torch.uint8, device=like.device)

    def full(self, shape: tuple[int, ...], value: int, like: Array) -> Array:
        return self._torch.full(shape, value, dtype=self._torch.uint8, device=like.device)

    def cat(self, arrays: list[Array], axis: int) -> Array:
        return self._torch.cat(arrays, axis)

    def where_true(self, mask: Array) -> Array:
        return mask.reshape(-1).nonzero().reshape(-1)

    def bytes_to_int64(self, array: Array) -> Array:
        return array.to(self._torch.int64)

    def int64_to_bytes(self, array: Array) -> Array:
        return array.to(self._torch.uint8)

    def to_words(self, values: Array) -> Array:
        signed = self._torch.where(values >= 1 << 31, values - (1 << 32), values)
        return signed.to(self._torch.int32).view(self._torch.uint32)

    def from_words(self, words: Array) -> Array:
        return words.view(self._torch.int32).to(self._torch.int64) & 0xFFFFFFFF

    def pairs_to_nibbles(self, codes: Array) -> Array:
        return codes[..., 0::2] | (codes[..., 1::2] << 4)

    def best_bases(self, rows: Array) -> Array:
        torch = self._torch
        bases = []
        for part in rows.split(1 << 16):  # 64 MiB of histogram at a time
            histogram = torch.zeros((part.shape[0], 257), dtype=torch.int32, device=rows.device)
            keys = part.to(torch.int64) + 1
            histogram.scatter_add_(1, keys, torch.ones_like(keys, dtype=torch.int32))
            total = histogram.cumsum(1, dtype=torch.int32)
            held = total[:, WINDOW:] - total[:, : LAST_BASE + 1]
            # torch.argmax may return any of several maxima; the lowest base has to win.
            order = torch.arange(LAST_BASE, -1, -1, dtype=torch.int32, device=rows.device)
            best = (held * 256 + order).amax(1)
            bases.append((LAST_BASE - (best & 255)).to(torch.uint8))
        return torch.cat(bases)

    def first(self, indices: Array) -> int | None:
        return int(indices[0].item()) if indices.numel() else None


NUMPY = NumpyBackend()


def backend_of(array: Array) -> Backend:
    """The backend for *array*."""
    return NUMPY if isinstance(array, np.ndarray) else TorchBackend()
