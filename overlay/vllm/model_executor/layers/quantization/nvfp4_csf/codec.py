# SPDX-License-Identifier: Apache-2.0
"""The codec ``byte-window4-fixed-stream-u24-exceptions/1``: one matrix of E4M3 scale bytes, losslessly.

A matrix is ``[R, C]`` bytes, row-major and not swizzled, with ``C = K / 16``: the block scales of one projection of
one expert. Each row has a base byte and codes every byte inside ``[base, base + 15]`` in four bits. What lies outside
is listed as an exception. Two streams result:

* fixed (uint8): ``R / 16`` slabs of ``16 * (1 + C / 2)`` bytes, 16 bases and then 16 rows of ``C / 2`` code bytes,
  low nibble = even column;
* exceptions (uint32, little endian): ``byte << 24 | row * C + column``, strictly increasing in the position. The code
  under an exception means nothing; the encoder writes 0.

Any base up to 240 decodes; the encoder takes the lowest base that leaves the fewest exceptions, so that its streams
are the same everywhere. Functions take numpy arrays or torch tensors on any device and return the same kind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .arrays import LAST_BASE, Array, backend_of

CODEC = "byte-window4-fixed-stream-u24-exceptions/1"
SLAB_ROWS = 16
MAX_POSITIONS = 1 << 24
PAD_BASE = 0x38
"""E4M3 1.0: what a padding row decodes to."""
_NAN = 0x7F
_POSITION = MAX_POSITIONS - 1


class CsfStreamError(ValueError):
    """A stream that does not decode: which tensor, at which byte of which stream, and why.

    Attributes:
        tensor: name of the scale tensor, empty if the caller gave none.
        stream: ``"fixed"``, ``"exceptions"`` or ``"geometry"``.
        offset: byte offset in that stream, 0 for geometry.
        reason: what is wrong there.
    """

    def __init__(self, tensor: str, stream: str, offset: int, reason: str) -> None:
        self.tensor, self.stream, self.offset, self.reason = tensor, stream, offset, reason
        where = f"{stream} stream, byte {offset}" if stream != "geometry" else "geometry"
        super().__init__(f"{tensor or 'scale tensor'}: {where}: {reason}")


@dataclass(frozen=True, eq=False)
class CsfStreams:
    """One compressed matrix.

    Attributes:
        rows, columns: logical shape R and C.
        fixed: uint8 ``[R * (1 + C / 2)]``.
        exceptions: uint32 ``[n]``.
        name: the tensor's name, for messages.
    """

    rows: int
    columns: int
    fixed: Array
    exceptions: Array
    name: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of both streams."""
        return int(self.fixed.shape[0]) + 4 * int(self.exceptions.shape[0])


def fixed_bytes(rows: int, columns: int) -> int:
    """Length of the fixed stream of a ``[rows, columns]`` matrix."""
    return rows * (1 + columns // 2)


def check_geometry(rows: int, columns: int, name: str = "") -> None:
    """Raise `CsfStreamError` unless the codec can hold a ``[rows, columns]`` matrix."""
    if rows <= 0 or rows % SLAB_ROWS:
        raise CsfStreamError(
            name, "geometry", 0, f"{rows} rows; a multiple of {SLAB_ROWS} is needed"
        )
    if columns <= 0 or columns % 2:
        raise CsfStreamError(name, "geometry", 0, f"{columns} columns; an even number is needed")
    if rows * columns > MAX_POSITIONS:
        raise CsfStreamError(
            name,
            "geometry",
            0,
            f"{rows} x {columns} is more than the {MAX_POSITIONS} positions of the codec",
        )


def encode(scales: Array, name: str = "") -> CsfStreams:
    """Compress a matrix of scale bytes, uint8 ``[R, C]`` (view float8 tensors as uint8 first).

    Raises:
        CsfStreamError: a geometry that the codec cannot hold, or another dtype or rank.
    """
    ops = backend_of(scales)
    if scales.ndim != 2 or not ops.is_bytes(scales):
        raise CsfStreamError(
            name, "geometry", 0, f"{scales.dtype} {tuple(scales.shape)}; uint8 [R, C] is needed"
        )
    rows, columns = (int(size) for size in scales.shape)
    check_geometry(rows, columns, name)
    scales = ops.contiguous(scales)
    bases = ops.best_bases(scales)
    codes = scales - bases[:, None]  # modulo 256: a byte below the base becomes large
    outside = codes >= 16
    positions = ops.where_true(outside)
    codes[outside] = 0
    values = ops.bytes_to_int64(scales.reshape(-1)[positions])
    slabs = rows // SLAB_ROWS
    fixed = ops.cat(
        [bases.reshape(slabs, SLAB_ROWS), ops.pairs_to_nibbles(codes).reshape(slabs, -1)],
        1,
    )
    return CsfStreams(
        rows, columns, fixed.reshape(-1), ops.to_words(values << 24 | positions), name
    )


def check(streams: CsfStreams) -> CsfStreams:
    """Return *streams* if they are well formed.

    Raises:
        CsfStreamError: geometry, dtype, length, a base above 240, or positions that are out of range, doubled or
            not in increasing order. The offset is that of the first offending byte or word.
    """
    rows, columns, name = streams.rows, streams.columns, streams.name
    check_geometry(rows, columns, name)
    fixed, words = streams.fixed, streams.exceptions
    ops = backend_of(fixed)
    for stream, array, good, wanted in (
        ("fixed", fixed, ops.is_bytes(fixed), "uint8"),
        ("exceptions", words, ops.is_words(words), "uint32"),
    ):
        if not good or array.ndim != 1:
            raise CsfStreamError(
                name, stream, 0, f"{array.dtype} {tuple(array.shape)}; {wanted} [n] is needed"
            )
    wanted_bytes = fixed_bytes(rows, columns)
    if fixed.shape[0] != wanted_bytes:
        found = int(fixed.shape[0])
        reason = f"{found} bytes; {rows} x {columns} scales take {wanted_bytes}"
        raise CsfStreamError(name, "fixed", min(found, wanted_bytes), reason)
    bases = _bases(streams).reshape(-1)
    bad = ops.first(ops.where_true(bases > LAST_BASE))
    if bad is not None:
        offset = bad // SLAB_ROWS * SLAB_ROWS * (1 + columns // 2) + bad % SLAB_ROWS
        raise CsfStreamError(
            name, "fixed", offset, f"base {int(bases[bad])} of row {bad} is above {LAST_BASE}"
        )
    positions = ops.from_words(words) & _POSITION
    bad = ops.first(ops.where_true(positions >= rows * columns))
    if bad is not None:
        reason = f"position {int(positions[bad])} is outside the {rows} x {columns} matrix"
        raise CsfStreamError(name, "exceptions", 4 * bad, reason)
    bad = ops.first(ops.where_true(positions[1:] <= positions[:-1]))
    if bad is not None:
        here, before = int(positions[bad + 1]), int(positions[bad])
        what = (
            "appears twice" if here == before else f"comes after {before}; positions must increase"
        )
        raise CsfStreamError(name, "exceptions", 4 * (bad + 1), f"position {here} {what}")
    return streams


def decode(streams: CsfStreams) -> Array:
    """The scale bytes, uint8 ``[R, C]``, on the device of the streams.

    Raises:
        CsfStreamError: see `check`, which runs first.
    """
    check(streams)
    ops = backend_of(streams.fixed)
    rows, columns = streams.rows, streams.columns
    nibbles = _nibbles(streams)
    bases = _bases(streams).reshape(rows, 1)
    scales = ops.zeros((rows, columns), streams.fixed)
    scales[:, 0::2] = (nibbles & 15) + bases
    scales[:, 1::2] = (nibbles >> 4) + bases
    words = ops.from_words(streams.exceptions)
    scales.reshape(-1)[words & _POSITION] = ops.int64_to_bytes(words >> 24)
    return scales


def slice_rows(streams: CsfStreams, first: int, last: int) -> CsfStreams:
    """Rows ``[first, last)`` without decoding; both must be multiples of 16.

    Raises:
        CsfStreamError: bounds outside the matrix or inside a slab.
    """
    if not 0 <= first < last <= streams.rows or first % SLAB_ROWS or last % SLAB_ROWS:
        reason = f"rows [{first}, {last}) of {streams.rows}: bounds must be multiples of {SLAB_ROWS} inside the matrix"
        raise CsfStreamError(streams.name, "geometry", 0, reason)
    columns = streams.columns
    ops = backend_of(streams.fixed)
    words = ops.from_words(streams.exceptions)
    positions = words & _POSITION
    inside = (positions >= first * columns) & (positions < last * columns)
    stride = 1 + columns // 2
    return replace(
        streams,
        rows=last - first,
        fixed=streams.fixed[first * stride : last * stride],
        exceptions=ops.to_words(words[inside] - first * columns),
    )


def slice_columns(streams: CsfStreams, first: int, last: int) -> CsfStreams:
    """Columns ``[first, last)`` without decoding; both must be even.

    Raises:
        CsfStreamError: bounds outside the matrix or inside a pair of columns.
    """
    if not 0 <= first < last <= streams.columns or first % 2 or last % 2:
        reason = f"columns [{first}, {last}) of {streams.columns}: bounds must be even and inside the matrix"
        raise CsfStreamError(streams.name, "geometry", 0, reason)
    ops = backend_of(streams.fixed)
    words = ops.from_words(streams.exceptions)
    positions = words & _POSITION
    row, column = positions // streams.columns, positions % streams.columns
    inside = (column >= first) & (column < last)
    moved = row[inside] * (last - first) + column[inside] - first
    fixed = _join(streams, _bases(streams), _nibbles(streams)[:, first // 2 : last // 2])
    kept = words[inside] >> 24 << 24 | moved
    return replace(streams, columns=last - first, fixed=fixed, exceptions=ops.to_words(kept))


def concat_rows(parts: list[CsfStreams], name: str = "") -> CsfStreams:
    """One matrix of the rows of *parts* in order, without decoding (w13 = up rows, then gate rows).

    Raises:
        CsfStreamError: different numbers of columns, or more positions than the codec has.
    """
    columns = parts[0].columns
    for part in parts:
        if part.columns != columns:
            reason = (
                f"{part.columns} columns beside {columns} of {parts[0].name or 'the first part'}"
            )
            raise CsfStreamError(part.name, "geometry", 0, reason)
    rows = sum(part.rows for part in parts)
    check_geometry(rows, columns, name)
    ops = backend_of(parts[0].fixed)
    words, before = [], 0
    for part in parts:
        words.append(ops.from_words(part.exceptions) + before * columns)
        before += part.rows
    return CsfStreams(
        rows,
        columns,
        ops.cat([part.fixed for part in parts], 0),
        ops.to_words(ops.cat(words, 0)),
        name,
    )


def pad(streams: CsfStreams, rows: int, columns: int) -> CsfStreams:
    """Extend to ``[rows, columns]`` without decoding.

    A padding row decodes to 1.0 (0x38). Padding columns decode to their row's base, except where that base is the
    NaN 0x7F: weights are zero there, and zero times any finite scale adds nothing, but zero times NaN would.

    Raises:
        CsfStreamError: a smaller shape, or a geometry that the codec cannot hold.
    """
    if rows < streams.rows or columns < streams.columns:
        reason = f"cannot pad {streams.rows} x {streams.columns} to {rows} x {columns}"
        raise CsfStreamError(streams.name, "geometry", 0, reason)
    check_geometry(rows, columns, streams.name)
    ops = backend_of(streams.fixed)
    fixed, words = streams.fixed, ops.from_words(streams.exceptions)
    if columns > streams.columns:
        bases, nibbles = _bases(streams), _nibbles(streams)
        extra = ops.zeros((streams.rows, (columns - streams.columns) // 2), fixed)
        extra[bases.reshape(-1) == _NAN] = 0x11
        fixed = _join(streams, bases, ops.cat([nibbles, extra], 1))
        positions = words & _POSITION
        moved = positions // streams.columns * columns + positions % streams.columns
        words = words >> 24 << 24 | moved
    if rows > streams.rows:
        slabs = (rows - streams.rows) // SLAB_ROWS
        extra = ops.zeros((slabs, SLAB_ROWS * (1 + columns // 2)), fixed)
        extra[:, :SLAB_ROWS] = PAD_BASE
        fixed = ops.cat([fixed, extra.reshape(-1)], 0)
    return replace(streams, rows=rows, columns=columns, fixed=fixed, exceptions=ops.to_words(words))


def _slabs(streams: CsfStreams) -> Array:
    return streams.fixed.reshape(streams.rows // SLAB_ROWS, SLAB_ROWS * (1 + streams.columns // 2))


def _bases(streams: CsfStreams) -> Array:
    return _slabs(streams)[:, :SLAB_ROWS]


def _nibbles(streams: CsfStreams) -> Array:
    return _slabs(streams)[:, SLAB_ROWS:].reshape(streams.rows, streams.columns // 2)


def _join(streams: CsfStreams, bases: Array, nibbles: Array) -> Array:
    slabs = streams.rows // SLAB_ROWS
    return backend_of(bases).cat([bases, nibbles.reshape(slabs, -1)], 1).reshape(-1)
