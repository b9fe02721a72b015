# SPDX-License-Identifier: Apache-2.0
"""Ordinary checkpoint to container, shard by shard.

Memory: one scale tensor, one copy block and at most `_SPOOL` bytes of streams per kind; what a shard's streams take
beyond that goes to temporary files in the work folder. A shard counts as done when its receipt is on disk, which is
written after the shard itself.
"""

from __future__ import annotations

import base64
import hashlib
import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np

from b12x_overlay.console import CommandError, Console
from b12x_overlay.csf.core import (
    CODEC,
    CsfStreams,
    Entry,
    ShardHeader,
    ShardRecord,
    codec,
    container,
    readable,
    shards,
)
from b12x_overlay.csf.files import (
    BLOCK,
    HashingWriter,
    as_bytes,
    copy_whole,
    explain_disk,
    refuse_small_disk,
    sha256_of,
    whole_file,
    write_json,
)
from b12x_overlay.csf.source import Source, hidden_layers
from b12x_overlay.csf.workfolder import fingerprint, finish, remove_command, working

_SPOOL = 256 << 20
FOLDERS = ("metadata", "tensors", "receipts")


def convert(
    source: Source, target: Path, console: Console, *, family: str, revision: str
) -> dict[str, Any]:
    """Write the container *target* and return what was done.

    Raises:
        CommandError: the destination exists, a full disk, a source that changed while it was read.
    """
    files = [header.path for header in source.headers] + source.others
    job = {
        "what": "convert",
        "source": str(source.root),
        "family": family,
        "files": fingerprint(files),
    }
    if source.left_behind:
        names = ", ".join(path.name for path in source.left_behind)
        console.progress(f"not carried along (sub-folders, hidden files, dangling links): {names}")
    with working(target, job, FOLDERS) as work, explain_disk(work, "run the command again"):
        done = sum(path.stat().st_size for path in (work / "tensors").iterdir())
        # Everything but the scales is copied, and scales rarely end above 55 % of their size.
        refuse_small_disk(work, int(source.total_bytes - 0.45 * source.scale_bytes) - done)
        metadata = {
            path.name: copy_whole(path, work / "metadata" / path.name) for path in source.others
        }
        records = []
        for number, header in enumerate(source.headers, 1):
            label = f"[{number}/{len(source.headers)}] {header.path.name}"
            record = _finished(work, header)
            if record is None:
                started = time.monotonic()
                record = _convert_shard(work, header, source.compressed)
                seconds = time.monotonic() - started
                rate = int(record.source_file_bytes / max(seconds, 1e-9))
                console.progress(
                    f"{label}: {readable(record.source_file_bytes)} -> "
                    f"{readable(record.target_file_bytes)}, {readable(rate)}/s"
                )
            else:
                console.progress(f"{label}: done by an earlier run")
            records.append(record)
        if fingerprint(files) != job["files"]:
            raise CommandError(
                f"{source.root}: files changed while they were read",
                hint=f"run the command again after {remove_command(target)}",
            )
        summary = _summary(work, source, records)
        _write_documents(work, source, records, metadata, family, revision, summary)
        finish(work, target)
    return summary


def _finished(work: Path, header: ShardHeader) -> ShardRecord | None:
    receipt = work / "receipts" / f"{header.path.name}.json"
    try:
        document = json.loads(receipt.read_bytes())
        record = ShardRecord(**{key: document[key] for key in ShardRecord.__dataclass_fields__})
        size = (work / "tensors" / header.path.name).stat().st_size
    except (FileNotFoundError, ValueError, KeyError):
        return None
    return record if size == record.target_file_bytes else None


def _convert_shard(
    work: Path, header: ShardHeader, compressed: dict[str, tuple[int, int]]
) -> ShardRecord:
    scales: dict[str, dict[str, Any]] = {}
    places: dict[str, int] = {}
    with (
        tempfile.SpooledTemporaryFile(_SPOOL, dir=str(work)) as fixed,
        tempfile.SpooledTemporaryFile(_SPOOL, dir=str(work)) as words,
    ):
        for name in header.entries:
            if name not in compressed:
                continue
            values = shards.read_tensor(header, name)
            streams = codec.encode(np.asarray(values).reshape(compressed[name]), name)
            places[name + container.FIXED] = fixed.tell()
            places[name + container.EXCEPTIONS] = words.tell()
            fixed.write(as_bytes(streams.fixed))
            words.write(
                memoryview(streams.exceptions).cast("B") if len(streams.exceptions) else b""
            )
            scales[name] = _scale_receipt(header.entries[name], values, streams)
        layout = _layout(header, scales)
        metadata = {"format": "pt", "schema": container.SCHEMA, "codec": CODEC}
        with whole_file(work / "tensors" / header.path.name) as out:
            out.write(shards.make_header(layout, metadata))
            for name, (_, _, nbytes) in layout.items():
                if name in header.entries:
                    out.write(as_bytes(shards.read_tensor(header, name)))
                else:
                    spool = fixed if name.endswith(container.FIXED) else words
                    _copy_part(spool, places[name], nbytes, out)
            record = ShardRecord(
                header.path.name,
                header.file_bytes,
                sha256_of(header.path),
                out.nbytes,
                out.sha256,
            )
    receipt = asdict(record)
    receipt["source_header_base64"] = base64.b64encode(header.raw).decode()
    receipt["scales"] = scales
    write_json(work / "receipts" / f"{header.path.name}.json", receipt)
    return record


def _layout(
    header: ShardHeader, scales: dict[str, dict[str, Any]]
) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """The new shard's tensors in file order: widest elements first, so that all data is aligned to its type."""
    layout: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for name, entry in sorted(header.entries.items(), key=lambda item: item[1].begin):
        if name not in scales:
            layout[name] = (entry.dtype, entry.shape, entry.nbytes)
            continue
        fixed, words = scales[name]["fixed_bytes"], scales[name]["exception_bytes"]
        layout[name + container.FIXED] = ("U8", (fixed,), fixed)
        layout[name + container.EXCEPTIONS] = ("U32", (words // 4,), words)
    ordered = sorted(layout.items(), key=lambda item: -shards.ITEM_BYTES.get(item[1][0], 1))
    return dict(ordered)


def _scale_receipt(
    entry: Entry, values: np.ndarray[Any, Any], streams: CsfStreams
) -> dict[str, Any]:
    return {
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "fixed_bytes": len(streams.fixed),
        "exception_bytes": 4 * len(streams.exceptions),
        "source_bytes": entry.nbytes,
        "source_sha256": hashlib.sha256(as_bytes(values)).hexdigest(),
    }


def _copy_part(spool: IO[bytes], place: int, nbytes: int, out: HashingWriter) -> None:
    spool.seek(place)
    while nbytes:
        block = spool.read(min(nbytes, BLOCK))
        out.write(block)
        nbytes -= len(block)


def _summary(work: Path, source: Source, records: list[ShardRecord]) -> dict[str, Any]:
    compressed = 0
    for record in records:
        receipt = json.loads((work / "receipts" / f"{record.file}.json").read_bytes())
        compressed += sum(
            scale["fixed_bytes"] + scale["exception_bytes"] for scale in receipt["scales"].values()
        )
    return {
        "shards": len(records),
        "scale_tensors": len(source.compressed),
        "scale_bytes": source.scale_bytes,
        "compressed_bytes": compressed,
        "ratio": compressed / source.scale_bytes,
        "source_bytes": sum(record.source_file_bytes for record in records),
        "target_bytes": sum(record.target_file_bytes for record in records),
    }


def _write_documents(
    work: Path,
    source: Source,
    records: list[ShardRecord],
    metadata: dict[str, str],
    family: str,
    revision: str,
    summary: dict[str, Any],
) -> None:
    head = {"schema": container.SCHEMA, "codec": CODEC, "family": family}
    names = {name: header.path.name for header in source.headers for name in header.entries}
    manifest: dict[str, Any] = dict(head)
    if revision:
        manifest["source_revision"] = revision
    manifest |= {"metadata_sha256": metadata, "shards": [asdict(record) for record in records]}
    write_json(work / container.CONTRACT, {**head, "source_names": names})
    layers = hidden_layers(source.root, source.config)
    write_json(work / "verification.json", {**head, **summary, "num_hidden_layers": layers})
    write_json(work / container.MANIFEST, manifest)
