# SPDX-License-Identifier: Apache-2.0
"""Safetensors shards byte by byte: header, inventory, and the bytes of one tensor.

The safetensors library hands out tensors; the container has to keep and restore files bit for bit, header text
included, and to say precisely what is wrong with a damaged one. Format: 8 bytes little-endian header length, JSON
header (it may end in spaces), then the data without gaps. Offsets in the header count from the start of the data.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_MAX_HEADER = 100_000_000  # the safetensors library's own limit
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
"""Bytes per element of the types that a ModelOpt checkpoint can hold."""


class ShardError(ValueError):
    """A shard that cannot be read: not safetensors, truncated, or inconsistent. The message names the file."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a shard; ``begin`` and ``end`` are offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class ShardHeader:
    """A shard's header. ``raw`` is everything before the data, the length included."""

    path: Path
    raw: bytes
    entries: dict[str, Entry]
    metadata: dict[str, str]
    file_bytes: int


def read_header(path: Path) -> ShardHeader:
    """Read and check the header of *path*.

    Raises:
        ShardError: see the class; an absent file is one, too.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(_MAX_HEADER, size - 8):
                raise ShardError(
                    f"{path}: truncated or not safetensors: {size} bytes, header length {length}"
                )
            text = file.read(length)
    except FileNotFoundError:
        raise ShardError(f"{path}: missing") from None
    try:
        header = json.loads(text, object_pairs_hook=_unique)
        metadata = header.pop("__metadata__", {})
        entries = {name: _entry(name, value, 8 + length) for name, value in header.items()}
        "".join(entries).encode()  # JSON can escape half a surrogate pair, which is no text
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ShardError(f"{path}: bad safetensors header: {error}") from None
    end = 8 + length
    for entry in sorted(entries.values(), key=lambda e: (e.begin, e.end)):
        if entry.begin != end:
            raise ShardError(
                f"{path}: {entry.name} starts at byte {entry.begin}, the data before it ends at {end}"
            )
        end = entry.end
    if end != size:
        what = "truncated" if size < end else "has trailing bytes"
        raise ShardError(f"{path}: {what}: {size} bytes, the header describes {end}")
    return ShardHeader(path, prefix + text, entries, metadata, size)


def read_tensor(header: ShardHeader, name: str) -> np.ndarray[Any, Any]:
    """The bytes of one tensor, uint8 ``[nbytes]``, mapped from the file and read-only."""
    entry = header.entries[name]
    if entry.nbytes == 0:  # an empty map is an error
        return np.zeros(0, np.uint8)
    return np.memmap(header.path, np.uint8, "r", entry.begin, (entry.nbytes,))


def make_header(
    tensors: dict[str, tuple[str, tuple[int, ...], int]], metadata: dict[str, str]
) -> bytes:
    """Header bytes for *tensors* (name: dtype, shape, bytes), whose data follows in this order.

    Padded with spaces to a multiple of 8, so that the data starts aligned.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, (dtype, shape, nbytes) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [offset, offset + nbytes],
        }
        offset += nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _entry(name: str, value: dict[str, Any], data: int) -> Entry:
    begin, end = (int(offset) for offset in value["data_offsets"])
    shape = tuple(int(size) for size in value["shape"])
    entry = Entry(name, str(value["dtype"]), shape, data + begin, data + end)
    item = ITEM_BYTES.get(entry.dtype)
    if begin < 0 or end < begin or any(size < 0 for size in shape):
        raise ValueError(f"{name}: offsets {begin}..{end}, shape {list(shape)}")
    if item is not None:
        wanted = item
        for size in shape:
            wanted *= size
        if wanted != entry.nbytes:
            raise ValueError(
                f"{name}: {entry.dtype} {list(shape)} takes {wanted} bytes, {entry.nbytes} given"
            )
    return entry


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{double} appears twice")
    return result
