# SPDX-License-Identifier: Apache-2.0
"""Writes a zip archive from another one, copying members without packing them again.

Python's zipfile cannot copy compressed members, so this writes the local headers itself; reading, packing and the
central directory stay with zipfile.
"""

from __future__ import annotations

import copy as copying
import struct
import zipfile
from types import TracebackType
from typing import IO, Self

_LOCAL = struct.Struct("<4s5H3L2H")
_DATA_DESCRIPTOR = 0x08


class ZipCopy:
    """Collects members into *out*; the archive is complete on leaving the ``with`` block without an exception."""

    def __init__(self, source: zipfile.ZipFile, out: IO[bytes]) -> None:
        self._source = source
        self._out = out
        self._zip = zipfile.ZipFile(out, "w")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._zip.close()
        else:
            self._zip.fp = (
                None  # else zipfile writes an end to the broken archive when it is collected
            )

    def put(
        self, name: str, data: bytes, like: zipfile.ZipInfo, *, executable: bool | None = None
    ) -> None:
        """Pack *data* as *name*, with *like*'s time and attributes."""
        member = zipfile.ZipInfo(name, like.date_time)
        member.create_system = like.create_system
        member.external_attr = like.external_attr
        if executable is not None:
            member.external_attr = (0o100755 if executable else 0o100644) << 16
        member.compress_type = zipfile.ZIP_DEFLATED
        self._zip.writestr(member, data, compresslevel=6)

    def copy(self, member: zipfile.ZipInfo, name: str) -> None:
        """Copy *member*'s packed bytes as *name*."""
        stream = self._source.fp
        assert stream is not None
        stream.seek(member.header_offset)
        head = _LOCAL.unpack(stream.read(_LOCAL.size))
        stream.seek(head[9] + head[10], 1)  # its name and extra field
        fresh = copying.copy(member)
        fresh.filename = fresh.orig_filename = name
        fresh.flag_bits &= ~_DATA_DESCRIPTOR  # the sizes stand in the header written here
        fresh.extra = b""
        self._out.seek(self._zip.start_dir)
        fresh.header_offset = self._out.tell()
        self._out.write(fresh.FileHeader(zip64=None))
        _copy_exactly(stream, self._out, member.compress_size)
        self._zip.filelist.append(fresh)
        self._zip.NameToInfo[fresh.filename] = fresh
        self._zip.start_dir = self._out.tell()


def _copy_exactly(source: IO[bytes], out: IO[bytes], size: int) -> None:
    while size:
        piece = source.read(min(size, 1 << 20))
        if not piece:
            raise zipfile.BadZipFile("the archive ends inside a member")
        out.write(piece)
        size -= len(piece)
