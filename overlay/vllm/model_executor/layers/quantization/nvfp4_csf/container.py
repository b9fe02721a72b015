# SPDX-License-Identifier: Apache-2.0
"""Where a CSF checkpoint keeps its tensors: the container and the index layout, read only.

Container ``lil-nvfp4-csf-checkpoint/1``::

    manifest.json  build-contract.json  verification.json
    metadata/               the source's other files (config.json, tokenizer, ...)
    tensors/*.safetensors   as the source's shards, every compressed X.weight_scale replaced by two streams
    receipts/<shard>.json   what the source's shard looked like, enough to restore it bit for bit

Index layout: an ordinary folder with model.safetensors.index.json whose shards hold the same two streams. Either
way a compressed ``X.weight_scale`` is stored as ``X.weight_scale.nvfp4_csf_fixed`` (U8) and
``X.weight_scale.nvfp4_csf_exceptions`` (U32), and its logical shape follows from ``X.weight``, U8 ``[N, K/2]``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .codec import CODEC, CsfStreamError, CsfStreams, check_geometry
from .shards import Entry, ShardError, ShardHeader, read_header, read_tensor

SCHEMA = "lil-nvfp4-csf-checkpoint/1"
FIXED = ".nvfp4_csf_fixed"
EXCEPTIONS = ".nvfp4_csf_exceptions"
SCALE = ".weight_scale"
MANIFEST = "manifest.json"
CONTRACT = "build-contract.json"
INDEX = "model.safetensors.index.json"
GROUP = 16


class ContainerError(ValueError):
    """A CSF checkpoint that does not add up. The message names the file, the wanted and the found value."""


@dataclass(frozen=True)
class ShardRecord:
    """One line of the manifest: a shard before and after compression."""

    file: str
    source_file_bytes: int
    source_sha256: str
    target_file_bytes: int
    target_sha256: str


@dataclass(frozen=True)
class Container:
    """An opened container; `open_container` has checked what it can without reading tensors."""

    root: Path
    family: str
    identity: str
    shards: tuple[ShardRecord, ...]
    source_names: dict[str, str]
    metadata: dict[str, str]

    def shard_path(self, file: str) -> Path:
        return self.root / "tensors" / file


@dataclass(frozen=True)
class Place:
    """Where the two streams of a compressed tensor lie, for messages.

    Attributes:
        tensor: the checkpoint's name of the scale tensor.
        file: the shard.
        fixed, exceptions: first bytes of the streams in that file.
    """

    tensor: str
    file: str
    fixed: int
    exceptions: int

    def __str__(self) -> str:
        return f"{self.file}: {self.tensor}"

    def explain(self, error: CsfStreamError) -> CsfStreamError:
        """*error*, which a stream of this tensor caused, with the file and the byte in it."""
        begins = {"fixed": self.fixed, "exceptions": self.exceptions}
        reason = error.reason
        if error.stream in begins:
            reason = f"byte {begins[error.stream] + error.offset} of the file: {reason}"
        advice = (
            "copy or convert it again; scripts/convert-csf --verify lists all faults of a container"
        )
        return CsfStreamError(str(self), error.stream, error.offset, f"{reason}; {advice}")


@dataclass(frozen=True)
class Location:
    """A tensor of the checkpoint under its original name; `exceptions` only where the scales are compressed."""

    name: str
    shard: ShardHeader
    entry: Entry
    exceptions: Entry | None = None

    @property
    def place(self) -> Place:
        """Where the streams are, of a compressed tensor."""
        assert self.exceptions is not None
        return Place(self.name, str(self.shard.path), self.entry.begin, self.exceptions.begin)


def open_container(root: Path) -> Container:
    """Read manifest and build contract and compare them with each other and with the files.

    Args:
        root: local folder, absolute.

    Raises:
        ContainerError: anything missing, of another schema or codec, or contradicting; a shard of the wrong size.
    """
    if "://" in str(root) or not root.is_absolute():
        raise ContainerError(
            f"{root}: the checkpoint root has to be an absolute path on this machine"
        )
    if not root.is_dir():
        raise ContainerError(f"{root}: no such folder")
    manifest_bytes = _read(root / MANIFEST)
    manifest = _json(root / MANIFEST, manifest_bytes)
    contract = _json(root / CONTRACT, _read(root / CONTRACT))
    for key, wanted in (("schema", SCHEMA), ("codec", CODEC)):
        for file, document in ((MANIFEST, manifest), (CONTRACT, contract)):
            if document.get(key) != wanted:
                raise ContainerError(
                    f"{root / file}: {key} is {document.get(key)!r}; this reader knows {wanted!r}"
                )
    family = manifest.get("family")
    if not isinstance(family, str) or not family or contract.get("family") != family:
        raise ContainerError(
            f"{root}: family is {family!r} in {MANIFEST} and {contract.get('family')!r} in {CONTRACT}; they must agree"
        )
    records = _records(root, manifest)
    names = contract.get("source_names")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise ContainerError(
            f"{root / CONTRACT}: source_names has to map tensor names to shard files"
        )
    listed, used = {record.file for record in records}, set(names.values())
    if listed != used:
        odd = sorted(listed ^ used)
        where = CONTRACT if odd[0] in listed else MANIFEST
        raise ContainerError(
            f"{root}: shard {odd[0]} is missing from {where}; both must list the same shards"
        )
    metadata = manifest.get("metadata_sha256", {})
    if not isinstance(metadata, dict):
        raise ContainerError(f"{root / MANIFEST}: metadata_sha256 has to map file names to hashes")
    for file in metadata:
        if not _is_plain(file) or not (root / "metadata" / file).is_file():
            raise ContainerError(f"{root / 'metadata' / file}: listed in {MANIFEST} but missing")
    identity = hashlib.sha256(b"lil-fp4-csf-v1\0" + manifest_bytes).hexdigest()
    container = Container(root, family, identity, records, names, metadata)
    for record in records:
        path = container.shard_path(record.file)
        found = path.stat().st_size if path.is_file() else None
        if found != record.target_file_bytes:
            what = "missing" if found is None else f"{found} bytes"
            raise ContainerError(
                f"{path}: {what}; {MANIFEST} says {record.target_file_bytes} bytes"
            )
    return container


def locate(container: Container) -> list[Location]:
    """Every tensor of the container by its original name, in the order of the shards.

    Raises:
        ContainerError: a tensor of the contract that its shard lacks, one that it does not name, one given twice,
            or half a pair of streams.
        ShardError: a shard that cannot be read.
    """
    found: dict[str, Location] = {}
    for record in container.shards:
        for location in shard_locations(read_header(container.shard_path(record.file))):
            _add(found, location)
    for name, location in found.items():
        wanted = container.source_names.get(name)
        if wanted != location.shard.path.name:
            said = f"says {wanted}" if wanted else "does not name it"
            raise ContainerError(f"{location.shard.path}: holds {name}; {CONTRACT} {said}")
    missing = [name for name in container.source_names if name not in found]
    if missing:
        file = container.source_names[missing[0]]
        raise ContainerError(
            f"{container.shard_path(file)}: {len(missing)} tensors are missing, the first is {missing[0]}"
        )
    return list(found.values())


def locate_index(folder: Path) -> list[Location]:
    """Every tensor of an index layout (or of a single model.safetensors), by its original name.

    Raises:
        ContainerError: no index, a shard name that leaves the folder, a tensor that is missing or given twice.
        ShardError: a shard that cannot be read.
    """
    index = folder / INDEX
    if not index.is_file():
        single = folder / "model.safetensors"
        if not single.is_file():
            raise ContainerError(f"{folder}: neither {INDEX} nor model.safetensors")
        return shard_locations(read_header(single))
    names = _json(index, _read(index)).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise ContainerError(f"{index}: weight_map has to map tensor names to shard files")
    found: dict[str, Location] = {}
    stored: dict[str, str] = {}
    for file in dict.fromkeys(names.values()):
        if not _is_shard_name(file):
            raise ContainerError(f"{index}: {file!r} is not a plain *.safetensors file name")
        header = read_header(folder / file)
        stored.update(dict.fromkeys(header.entries, file))
        for location in shard_locations(header):
            _add(found, location)
    for name, file in names.items():
        if stored.get(name) != file:
            raise ContainerError(f"{folder / file}: {name} is missing, {INDEX} places it there")
    return list(found.values())


def shard_locations(header: ShardHeader) -> list[Location]:
    """The tensors of one shard by their original names, in file order.

    Raises:
        ContainerError: a stream without its other half, of another dtype, or beside the plain scales.
    """
    result = []
    for name, entry in sorted(header.entries.items(), key=lambda item: item[1].begin):
        if name.endswith(EXCEPTIONS):
            if name.removesuffix(EXCEPTIONS) + FIXED not in header.entries:
                raise ContainerError(f"{header.path}: {name} has no {FIXED} beside it")
            continue
        if not name.endswith(FIXED):
            result.append(Location(name, header, entry))
            continue
        original = name.removesuffix(FIXED)
        exceptions = header.entries.get(original + EXCEPTIONS)
        if exceptions is None:
            raise ContainerError(f"{header.path}: {name} has no {EXCEPTIONS} beside it")
        if original in header.entries:
            raise ContainerError(f"{header.path}: {original} is there both plain and compressed")
        for stream, dtype in ((entry, "U8"), (exceptions, "U32")):
            if stream.dtype != dtype:
                raise ContainerError(
                    f"{header.path}: {stream.name} is {stream.dtype}; {dtype} is wanted"
                )
        result.append(Location(original, header, entry, exceptions))
    return result


def scale_shape(name: str, weight: Entry | None) -> tuple[int, int]:
    """Logical shape ``[N, K / 16]`` of the scale tensor *name* from its weight, U8 ``[N, K / 2]``.

    Raises:
        ContainerError: no weight, or one that is not packed FP4.
    """
    if weight is None:
        raise ContainerError(
            f"{name}: the checkpoint has no {name.removesuffix(SCALE)}.weight beside it"
        )
    if weight.dtype != "U8" or len(weight.shape) != 2 or weight.shape[1] * 2 % GROUP:
        raise ContainerError(
            f"{weight.name}: {weight.dtype} {list(weight.shape)}; packed FP4 is U8 [N, K/2] with K a multiple of 16"
        )
    return weight.shape[0], weight.shape[1] * 2 // GROUP


def check_geometry_of(location: Location, by_name: Mapping[str, Location]) -> tuple[int, int]:
    """`scale_shape` of the scale tensor at *location*, which the codec can hold.

    Raises:
        ContainerError: naming the file.
    """
    weight = by_name.get(location.name.removesuffix(SCALE) + ".weight")
    try:
        shape = scale_shape(location.name, weight.entry if weight else None)
        check_geometry(*shape, location.name)
    except (ContainerError, CsfStreamError) as error:
        raise ContainerError(f"{(weight or location).shard.path}: {error}") from None
    return shape


@contextmanager
def placed(place: Place | None) -> Iterator[None]:
    """Errors of streams inside name *place*."""
    try:
        yield
    except CsfStreamError as error:
        raise (place.explain(error) if place else error) from None


def read_streams(location: Location, shape: tuple[int, int]) -> CsfStreams:
    """The two streams of a compressed tensor, mapped from the file and not checked yet."""
    assert location.exceptions is not None
    fixed = read_tensor(location.shard, location.entry.name)
    words = read_tensor(location.shard, location.exceptions.name)
    return CsfStreams(*shape, fixed, words.view("<u4"), location.name)


def _add(found: dict[str, Location], location: Location) -> None:
    before = found.get(location.name)
    if before is not None:
        raise ContainerError(
            f"{location.name} is in {before.shard.path} and again in {location.shard.path}"
        )
    found[location.name] = location


def _records(root: Path, manifest: dict[str, Any]) -> tuple[ShardRecord, ...]:
    shards = manifest.get("shards")
    if not isinstance(shards, list) or not shards:
        raise ContainerError(f"{root / MANIFEST}: shards has to be a list of shard records")
    records = []
    for shard in shards:
        try:
            record = ShardRecord(
                str(shard["file"]),
                int(shard["source_file_bytes"]),
                str(shard["source_sha256"]),
                int(shard["target_file_bytes"]),
                str(shard["target_sha256"]),
            )
        except (TypeError, KeyError, ValueError) as error:
            raise ContainerError(
                f"{root / MANIFEST}: bad shard record {shard!r}: {error}"
            ) from None
        if not _is_shard_name(record.file):
            raise ContainerError(
                f"{root / MANIFEST}: {record.file!r} is not a plain *.safetensors file name"
            )
        records.append(record)
    files = [record.file for record in records]
    if len(set(files)) != len(files):
        double = next(file for file in files if files.count(file) > 1)
        raise ContainerError(f"{root / MANIFEST}: shard {double} is listed twice")
    return tuple(records)


def _is_plain(name: str) -> bool:
    return Path(name).name == name and name not in ("", ".", "..") and "\\" not in name


def _is_shard_name(name: str) -> bool:
    return _is_plain(name) and name.endswith(".safetensors")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ContainerError(f"{path}: missing; is {path.parent} a CSF container?") from None


def _json(path: Path, data: bytes) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ContainerError(f"{path}: not JSON: {error}") from None
    if not isinstance(document, dict):
        raise ContainerError(f"{path}: a JSON object is wanted")
    return document


__all__ = [
    "Container",
    "ContainerError",
    "Location",
    "Place",
    "ShardError",
    "ShardRecord",
    "check_geometry_of",
    "locate",
    "locate_index",
    "open_container",
    "placed",
    "read_streams",
    "scale_shape",
    "shard_locations",
]
