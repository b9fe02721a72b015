# SPDX-License-Identifier: Apache-2.0
"""Container back to the ordinary checkpoint, bit for bit, and the proof that this would work (`--verify`).

Both rebuild every source shard from its receipt (the original header, then the tensors in their original places) and
compare SHA-256 with what was recorded at conversion; `--restore` writes the bytes, `--verify` only hashes them.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from b12x_overlay.console import CommandError, Console
from b12x_overlay.csf.core import (
    Container,
    ContainerError,
    CsfStreamError,
    ShardError,
    ShardRecord,
    codec,
    container,
    readable,
    shards,
)
from b12x_overlay.csf.files import (
    as_bytes,
    copy_whole,
    explain_disk,
    refuse_small_disk,
    sha256_of,
    whole_file,
)
from b12x_overlay.csf.workfolder import fingerprint, finish, working
from b12x_overlay.exitcodes import ExitCode

Bytes = bytes | memoryview


def open_checked(root: Path) -> Container:
    """Open a container for the commands.

    Raises:
        CommandError: what `container.open_container` found, with exit code 1: the container is at fault.
    """
    with faults():
        return container.open_container(root)


@contextmanager
def faults() -> Iterator[None]:
    """Turn what the container's reader finds into the commands' error, with exit code 1."""
    try:
        yield
    except (ContainerError, ShardError, CsfStreamError) as error:
        raise _fault(str(error)) from None


def verify(root: Path, console: Console) -> list[str]:
    """Faults of the container *root*, empty if every hash is as recorded. Reads everything, writes nothing."""
    try:
        box = container.open_container(root)
        container.locate(box)
    except (ContainerError, ShardError) as error:
        return [str(error)]
    faults = []
    for name, wanted in box.metadata.items():
        if sha256_of(root / "metadata" / name) != wanted:
            faults.append(f"{root / 'metadata' / name}: SHA-256 differs from {container.MANIFEST}")
    for number, record in enumerate(box.shards, 1):
        path = box.shard_path(record.file)
        console.progress(f"[{number}/{len(box.shards)}] {record.file}")
        if sha256_of(path) != record.target_sha256:
            faults.append(f"{path}: SHA-256 differs from {container.MANIFEST}")
            continue
        digest = hashlib.sha256()
        try:
            for part in source_bytes(box, record):
                digest.update(part)
        except CommandError as error:
            faults.append(str(error))
            continue
        if digest.hexdigest() != record.source_sha256:
            faults.append(
                f"{path}: decodes to other bytes than the source had (SHA-256 of the source shard)"
            )
    return faults


def restore(root: Path, target: Path, console: Console) -> dict[str, Any]:
    """Write the source checkpoint of container *root* to *target*.

    Raises:
        CommandError: a fault in the container, an existing destination, a full disk.
    """
    box = open_checked(root)
    paths = [box.shard_path(record.file) for record in box.shards]
    job = {"what": "restore", "source": str(root), "files": fingerprint(paths)}
    with working(target, job, ()) as work, explain_disk(work, "run the command again"):
        total = sum(record.source_file_bytes for record in box.shards)
        kept = (work / record.file for record in box.shards)
        done = sum(path.stat().st_size for path in kept if path.is_file())
        refuse_small_disk(work, total - done)
        for name in box.metadata:
            copy_metadata(box, name, work)
        for number, record in enumerate(box.shards, 1):
            label = f"[{number}/{len(box.shards)}] {record.file}"
            if _is_done(work / record.file, record):
                console.progress(f"{label}: done by an earlier run")
                continue
            with whole_file(work / record.file) as out:
                for part in source_bytes(box, record):
                    out.write(part)
                if out.sha256 != record.source_sha256:
                    raise _fault(
                        f"{box.shard_path(record.file)}: decodes to other bytes than the source had"
                    )
            console.progress(f"{label}: {readable(record.source_file_bytes)}, SHA-256 as recorded")
        finish(work, target)
    return {"shards": len(box.shards), "source_bytes": total}


def read_metadata(box: Container, name: str) -> bytes:
    """One of the source's other files, a small one.

    Raises:
        CommandError: its SHA-256 is not the recorded one.
        FileNotFoundError: the source had no such file.
    """
    path = box.root / "metadata" / name
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != box.metadata.get(name):
        raise _fault(f"{path}: SHA-256 differs from {container.MANIFEST}")
    return data


def copy_metadata(box: Container, name: str, folder: Path) -> None:
    """Copy one of the source's other files into *folder*.

    Raises:
        CommandError: its SHA-256 is not the recorded one.
    """
    path = box.root / "metadata" / name
    if copy_whole(path, folder / name) != box.metadata[name]:
        raise _fault(f"{path}: SHA-256 differs from {container.MANIFEST}")


def source_bytes(box: Container, record: ShardRecord) -> Iterator[Bytes]:
    """The bytes of the source shard in order, decoded tensor by tensor.

    Raises:
        CommandError: no usable receipt, a stream that does not decode, scales other than those recorded.
    """
    path = box.shard_path(record.file)
    receipt = _receipt(box.root / "receipts" / f"{record.file}.json", record)
    try:
        header = shards.read_header(path)
        stored = {location.name: location for location in container.shard_locations(header)}
        raw = base64.b64decode(receipt["source_header_base64"], validate=True)
        yield raw
        for name, begin in _source_order(raw):
            location = stored.get(name)
            if location is None:
                raise _fault(f"{path}: {name} is missing; the source shard had it at byte {begin}")
            if location.exceptions is None:
                yield as_bytes(shards.read_tensor(header, name))
            else:
                with container.placed(location.place):
                    yield _decoded(location, receipt["scales"][name], path)
    except (ContainerError, ShardError, CsfStreamError) as error:
        raise _fault(str(error)) from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _fault(
            f"{box.root / 'receipts' / record.file}.json: bad receipt: {error!r}"
        ) from None


def _decoded(location: container.Location, scale: dict[str, Any], path: Path) -> Bytes:
    rows, columns = scale["shape"]
    values: np.ndarray[Any, Any] = codec.decode(container.read_streams(location, (rows, columns)))
    if hashlib.sha256(as_bytes(values)).hexdigest() != scale["source_sha256"]:
        raise _fault(
            f"{path}: {location.name} decodes to other scales than the source had (SHA-256)"
        )
    return as_bytes(values)


def _source_order(raw: bytes) -> list[tuple[str, int]]:
    header = json.loads(raw[8:])
    header.pop("__metadata__", None)
    places = [(name, int(value["data_offsets"][0])) for name, value in header.items()]
    return sorted(places, key=lambda place: place[1])


def _receipt(path: Path, record: ShardRecord) -> dict[str, Any]:
    try:
        receipt = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise _fault(f"{path}: missing; without it the source shard cannot be rebuilt") from None
    except (ValueError, RecursionError) as error:
        raise _fault(f"{path}: not JSON: {error}") from None
    if not isinstance(receipt, dict) or receipt.get("source_sha256") != record.source_sha256:
        raise _fault(
            f"{path}: not the receipt of the shard in {container.MANIFEST} (source_sha256 differs)"
        )
    return receipt


def _is_done(path: Path, record: ShardRecord) -> bool:
    # A file gets its name only when its hash was right and it is on disk; a resumed run checks the size.
    return path.is_file() and path.stat().st_size == record.source_file_bytes


def _fault(message: str) -> CommandError:
    return CommandError(
        message,
        code=ExitCode.DIFFERENT,
        reason="fault",
        hint="the container is damaged or incomplete: copy it again, or convert the source again",
    )
