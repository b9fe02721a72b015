# SPDX-License-Identifier: Apache-2.0
"""From the streams of the whole model's experts to the planes of this rank.

vLLM's models map checkpoint names to parameters and hand single tensors to a parameter's weight loader. Streams take
that road, too: the model loader packs the two of a scale tensor into one uint8 tensor under the original name
(`pack`), the layer's scale parameter unpacks it, takes this rank's part without decoding, and collects it. Where the
streams came from travels along, because a parameter's name says neither the expert nor the file.
"""

from __future__ import annotations

import json
import weakref
from dataclasses import astuple, replace

import numpy as np
import torch
from vllm.model_executor.layers.quantization.nvfp4_csf import codec
from vllm.model_executor.layers.quantization.nvfp4_csf.codec import CsfStreamError, CsfStreams
from vllm.model_executor.layers.quantization.nvfp4_csf.container import Place, placed
from vllm.model_executor.layers.quantization.nvfp4_csf.planes import ScalePlanes, build

GROUP = 16
_PAD = 64
"""Rows per gated half and K values that b12x's NVFP4 kernels want; vLLM pads weights to it, too."""
_MAGIC = int.from_bytes(b"CSFpack1", "little")
_HEADER = 5  # int64 words: magic, rows, columns, exceptions, bytes of the place
SHARDS = ("w1", "w3", "w2")
"""vLLM's names of gate, up and down."""


def pack(
    fixed: torch.Tensor,
    exceptions: torch.Tensor,
    rows: int,
    columns: int,
    place: Place | None = None,
) -> torch.Tensor:
    """One uint8 vector of both streams (uint8, uint32; host tensors), their logical shape and their *place*."""
    text = json.dumps(astuple(place)).encode() if place else b""
    header = torch.tensor([_MAGIC, rows, columns, exceptions.numel(), len(text)], dtype=torch.int64)
    parts = [header.view(torch.uint8), fixed.reshape(-1)]
    if exceptions.numel():  # torch does not view an empty array that numpy gave a stride of 0
        parts.append(exceptions.reshape(-1).view(torch.uint8))
    if text:
        parts.append(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    return torch.cat(parts)


def unpack(packed: torch.Tensor, name: str) -> tuple[CsfStreams, Place | None]:
    """The streams in *packed*, without a copy, and where they came from.

    Raises:
        ValueError: anything else, above all plain scales that reach a layer whose scales are compressed.
    """
    data = packed.detach().cpu().reshape(-1).numpy() if packed.dtype == torch.uint8 else None
    header = (
        data[: 8 * _HEADER].view(np.int64)
        if data is not None and len(data) >= 8 * _HEADER
        else None
    )
    if header is None or header[0] != _MAGIC:
        raise ValueError(
            f"{name}: {packed.dtype} {list(packed.shape)} reached a layer whose scales are compressed; load the "
            "checkpoint with --load-format nvfp4_csf"
        )
    _, rows, columns, count, text = (int(word) for word in header)
    body = data[8 * _HEADER :]
    end = len(body) - text
    split = end - 4 * count
    place = Place(*json.loads(body[end:].tobytes())) if text else None
    name = place.tensor if place else name
    return CsfStreams(rows, columns, body[:split], body[split:end].view("<u4"), name), place


def pad_intermediate(size: int) -> int:
    """A rank's intermediate size as the kernels take it."""
    return -(-size // _PAD) * _PAD


class RankStreams:
    """Collects this rank's part of one layer's streams; any order, each tensor once.

    Args:
        experts, hidden: E and H; intermediate: of the whole model; rank, ranks: of tensor parallelism.

    Raises:
        ValueError: a split that leaves no whole scale groups.
    """

    def __init__(self, experts: int, hidden: int, intermediate: int, rank: int, ranks: int) -> None:
        if intermediate % ranks or intermediate // ranks % GROUP:
            raise ValueError(
                f"intermediate size {intermediate} over {ranks} ranks gives no multiple of {GROUP} each"
            )
        self.experts, self.hidden, self.intermediate = experts, hidden, intermediate
        self._ranks, self._share = ranks, intermediate // ranks
        self._first = self._share * rank
        self._padded = pad_intermediate(self._share)
        self._parts: dict[tuple[int, str], CsfStreams] = {}
        self._seen: dict[tuple[int, str], weakref.ref[torch.Tensor]] = {}

    def add(self, expert: int, shard: str, packed: torch.Tensor, name: str) -> None:
        """Take one packed tensor. The same tensor again is ignored (vLLM replays buffered loads).

        Raises:
            ValueError: not packed streams, another shape than the layer's, or a second tensor for the same place.
            CsfStreamError: a malformed stream.
        """
        place = expert, shard
        seen = self._seen[place]() if place in self._seen else None
        if seen is not None and seen.data_ptr() == packed.data_ptr():
            return
        streams, source = unpack(packed, name)
        where = f"{source} (for {name})" if source else name
        if place in self._parts:
            raise ValueError(
                f"{where}: given twice for expert {expert}; the checkpoint holds it in two places"
            )
        down = shard == "w2"
        wanted = (self.hidden, self.intermediate) if down else (self.intermediate, self.hidden)
        if (streams.rows, streams.columns * GROUP) != wanted:
            raise ValueError(
                f"{where}: scales of a weight [{streams.rows}, {streams.columns * GROUP}], the layer's is {list(wanted)}"
            )
        with placed(source):
            codec.check(streams)
        self._parts[place] = self._down(streams) if down else self._gate_or_up(streams)
        self._seen[place] = weakref.ref(packed)

    def missing(self) -> list[str]:
        """``expert/shard`` of every part that has not come."""
        return [
            f"{expert}/{shard}"
            for expert in range(self.experts)
            for shard in SHARDS
            if (expert, shard) not in self._parts
        ]

    def planes(self, device: torch.device | str) -> tuple[ScalePlanes, ScalePlanes]:
        """Planes of w13 (up rows, then gate rows) and w2 on *device*; the streams are let go."""
        up_gate = (
            codec.concat_rows(
                [self._parts[e, "w3"], self._parts[e, "w1"]], self._parts[e, "w3"].name
            )
            for e in range(self.experts)
        )
        w13 = build(list(up_gate), device)
        w2 = build([self._parts[e, "w2"] for e in range(self.experts)], device)
        self.clear()
        return w13, w2

    def clear(self) -> None:
        """Forget everything, for the next load."""
        self._parts.clear()
        self._seen.clear()

    def _gate_or_up(self, streams: CsfStreams) -> CsfStreams:
        part = codec.slice_rows(streams, self._first, self._first + self._share)
        padded = codec.pad(part, self._padded, streams.columns)
        # A slice is a view: without a copy every rank would keep the whole model's streams until its layer is complete.
        return replace(padded, fixed=padded.fixed.copy()) if self._ranks > 1 else padded

    def _down(self, streams: CsfStreams) -> CsfStreams:
        first, last = self._first // GROUP, (self._first + self._share) // GROUP
        padded = self._padded // GROUP
        if first % 2 or last % 2:
            # The bounds cut a pair of nibbles: the one case in which the part has to be coded anew.
            scales = codec.decode(streams)[:, first:last]
            even = np.pad(scales, ((0, 0), (0, (last - first) % 2)))
            return codec.pad(codec.encode(even, streams.name), streams.rows, padded)
        return codec.pad(codec.slice_columns(streams, first, last), streams.rows, padded)


__all__ = ["CsfStreamError", "RankStreams", "pack", "pad_intermediate", "unpack"]
