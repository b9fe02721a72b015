# SPDX-License-Identifier: Apache-2.0
"""Headers and scalars of safetensors files, without loading a tensor.

A file is an 8-byte little-endian header length, a JSON header {name: {dtype, shape, data_offsets}} and the data;
offsets count from the end of the header (the format's specification).
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MAX_HEADER = 100_000_000  # the reference implementation's own limit
_FORMATS = {"F32": "f", "F64": "d", "F16": "e"}
_WIDTHS = {"F32": 4, "F64": 8, "F16": 2, "BF16": 2}


class CheckpointError(ValueError):
    """A file of the checkpoint is missing, cut short or malformed; the message names it."""


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: *file*, absolute byte range [*begin*, *end*), safetensors *dtype* name and *shape*."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """The tensors of one file and its ``__metadata__``.

    Raises:
        CheckpointError: not a safetensors file, or shorter than its header says.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(size - 8, _MAX_HEADER):
                raise CheckpointError(
                    f"{path}: not a safetensors file, or its download is incomplete ({size} bytes)"
                )
            header = json.loads(stream.read(length))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: the safetensors header is not valid JSON") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the safetensors header is not a JSON object")
    metadata = header.pop("__metadata__", None) or {}
    tensors = {}
    for name, entry in header.items():
        info = _info(path, name, entry, 8 + length)
        if info.end > size:
            raise CheckpointError(
                f"{path}: cut short: {name} ends at byte {info.end}, the file has {size}"
            )
        tensors[name] = info
    return tensors, metadata


def _info(path: Path, name: str, entry: Any, base: int) -> TensorInfo:
    try:
        begin, end = entry["data_offsets"]
        return TensorInfo(
            path,
            str(entry["dtype"]),
            tuple(map(int, entry["shape"])),
            base + int(begin),
            base + int(end),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the header entry of {name} is malformed") from error


class ScalarReader:
    """Reads small float tensors by offset; keeps the last file open, so read in file order."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._descriptor = -1

    def read(self, info: TensorInfo) -> tuple[float, ...]:
        """All values of *info* in storage order.

        Raises:
            CheckpointError: a dtype that is no float, or a byte range that does not fit it.
        """
        width = _WIDTHS.get(info.dtype)
        count = 1
        for extent in info.shape:
            count *= extent
        if width is None or info.end - info.begin != width * count:
            raise CheckpointError(
                f"{info.file}: {info.dtype}{list(info.shape)} is no float tensor of its byte range"
            )
        if info.file != self._path:
            self.close()
            self._descriptor = os.open(info.file, os.O_RDONLY | os.O_CLOEXEC)
            self._path = info.file
        data = os.pread(self._descriptor, width * count, info.begin)
        if len(data) != width * count:
            raise CheckpointError(f"{info.file}: cut short at byte {info.begin + len(data)}")
        if info.dtype == "BF16":  # the upper half of a float32
            data = b"".join(b"\0\0" + data[at : at + 2] for at in range(0, len(data), 2))
            return struct.unpack(f"<{count}f", data)
        return struct.unpack(f"<{count}{_FORMATS[info.dtype]}", data)

    def close(self) -> None:
        """Close the open file, if any."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._path, self._descriptor = None, -1
