# SPDX-License-Identifier: Apache-2.0
"""Receipts of releases: which fragments were published, by git blob id, and whether they still are the same bytes."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from b12x_overlay.changes.model import Entry, Fault, blob_id
from b12x_overlay.console import CommandError
from b12x_overlay.exitcodes import ExitCode

RECEIPT_SCHEMA = "b12x-overlay-release-receipt/v1"
CHANGELOG_SCHEMA = "local-inference-container-changelog/v1"
"""The fork publisher's release-changelog.json: it lists the fragments that were new in its release."""

_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
RELEASE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


@dataclass(frozen=True)
class Receipt:
    """What one release published: *fragments* maps id to blob id."""

    release: str
    published_at: str
    fragments: Mapping[str, str]
    source: str
    commit: str = ""


def read_receipt(path: Path) -> Receipt:
    """Read a receipt of ours or the fork publisher's release-changelog.json.

    Raises:
        CommandError: unreadable, or neither of the two. Never taken for "nothing published".
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _wrong(str(path), f"cannot be read: {error.strerror}") from error
    return parse_receipt(str(path), data)


def parse_receipt(source: str, data: bytes) -> Receipt:
    """Read a receipt's bytes; *source* is for messages.

    Raises:
        CommandError: as `read_receipt`.
    """
    try:
        document = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _wrong(source, f"is not JSON: {error}") from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema == RECEIPT_SCHEMA:
        return _own(source, document)
    if schema == CHANGELOG_SCHEMA:
        return _changelog(source, document)
    raise _wrong(
        source, f'has the schema {schema!r}; wanted "{RECEIPT_SCHEMA}" or "{CHANGELOG_SCHEMA}"'
    )


def _own(source: str, document: dict[str, Any]) -> Receipt:
    unknown = set(document) - {"schema", "release", "published_at", "commit", "fragments"}
    if unknown:
        raise _wrong(source, f"has unknown keys: {', '.join(sorted(unknown))}")
    release, published = document.get("release"), document.get("published_at")
    fragments, commit = document.get("fragments"), document.get("commit", "")
    if not isinstance(release, str) or not RELEASE_NAME.fullmatch(release):
        raise _wrong(source, f"release is {release!r}; wanted a name")
    if not isinstance(published, str) or parse_time(published) is None:
        raise _wrong(
            source, f"published_at is {published!r}; wanted a UTC time such as 2026-11-30T12:00:00Z"
        )
    if not isinstance(fragments, dict) or not all(_is_blob(blob) for blob in fragments.values()):
        raise _wrong(source, "fragments must map each id to the blob id of its file")
    if not isinstance(commit, str):
        raise _wrong(source, f"commit is {commit!r}; wanted a text")
    return Receipt(release, published, fragments, source, commit)


def _changelog(source: str, document: dict[str, Any]) -> Receipt:
    changes = document.get("changes")
    if not isinstance(changes, list) or not all(
        isinstance(change, dict)
        and isinstance(change.get("id"), str)
        and _is_blob(change.get("fragment_blob_sha"))
        for change in changes
    ):
        raise _wrong(source, "changes must list fragments with id and fragment_blob_sha")
    name = next(
        (
            value
            for key in ("release_channel", "channel")
            if isinstance(value := document.get(key), str)
        ),
        "",
    )
    return Receipt(
        name or Path(source).stem,
        "",
        {change["id"]: change["fragment_blob_sha"] for change in changes},
        source,
    )


def _is_blob(value: Any) -> bool:
    return isinstance(value, str) and _BLOB.fullmatch(value) is not None


def parse_time(text: str) -> datetime.datetime | None:
    """A receipt's time of publication, or None where *text* is none."""
    try:
        return datetime.datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=datetime.UTC)
    except ValueError:
        return None


def read_receipts(folder: Path) -> list[Receipt]:
    """Every receipt in *folder*, oldest first (by time of publication, then name); none if there is no folder.

    Raises:
        CommandError: a file that is no receipt, a release that is there twice.
    """
    if not folder.is_dir():
        return []
    return order_receipts([read_receipt(path) for path in sorted(folder.glob("*.json"))])


def order_receipts(receipts: list[Receipt]) -> list[Receipt]:
    """*receipts*, oldest first.

    Raises:
        CommandError: a release that is there twice.
    """
    releases: dict[str, str] = {}
    for receipt in receipts:
        if receipt.release in releases:
            raise _wrong(
                receipt.source,
                f"is a second receipt of {receipt.release} beside {releases[receipt.release]}",
            )
        releases[receipt.release] = receipt.source
    return sorted(receipts, key=lambda receipt: (receipt.published_at, receipt.release))


def published_faults(
    entries: list[Entry], receipt: Receipt, component: str, old_bytes: Callable[[str], bytes | None]
) -> Iterator[Fault]:
    """Published fragments that were edited, re-indented or deleted since *receipt*.

    Args:
        entries: the folder as it is.
        component: ids of other components in a publisher's changelog are not this folder's.
        old_bytes: gives a blob's bytes by id, or None where they are not to be had.
    """
    present = {entry.stem: entry for entry in entries if entry.name.endswith(".json")}
    for name, blob in sorted(receipt.fragments.items()):
        if not name.startswith(f"{component}-"):
            continue
        file = f"{name}.json"
        since = f"published in {receipt.release} as blob {blob[:12]}"
        entry = present.get(name)
        if entry is None or entry.data is None:
            yield Fault(
                file, "", f"{since}, is deleted", _way_out(name, file, blob), "published-deleted"
            )
            continue
        found = blob_id(entry.data, "sha1" if len(blob) == 40 else "sha256")
        if found != blob:
            how = "re-formatted" if _same_content(entry.data, old_bytes(blob)) else "edited"
            what = f"{since}, is now {found[:12]} ({how})"
            yield Fault(file, "", what, _way_out(name, file, blob), "published-changed")


def _same_content(new: bytes, old: bytes | None) -> bool:
    try:
        return old is not None and json.loads(new) == json.loads(old)
    except ValueError:
        return False


def _way_out(name: str, file: str, blob: str) -> str:
    return (
        f"put it back (in its folder: git cat-file blob {blob[:12]} > {file}) and correct it by a new fragment: "
        f"scripts/changes new --id {name}-correction --requires {name}"
    )


def write_receipt(folder: Path, receipt: Receipt) -> Path:
    """Write *receipt* to *folder*; never over an existing file.

    Raises:
        CommandError: the release has a receipt already, or its name cannot be a file's name.
    """
    if not RELEASE_NAME.fullmatch(receipt.release):
        raise CommandError(
            f"{receipt.release!r} is no release name; wanted letters, digits, '.', '_', '+', '-'",
            code=ExitCode.USAGE,
        )
    document = {
        "schema": RECEIPT_SCHEMA,
        "release": receipt.release,
        "published_at": receipt.published_at,
        "commit": receipt.commit,
        "fragments": dict(sorted(receipt.fragments.items())),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{receipt.release}.json"
    try:
        with path.open("x", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(document, indent=2) + "\n")
    except FileExistsError as error:
        raise CommandError(
            f"{path} exists: {receipt.release} was published already", reason="receipt-exists",
            hint="give the new release another name; a receipt is never rewritten",
        ) from error  # fmt: skip
    return path


def _wrong(source: str, what: str) -> CommandError:
    return CommandError(
        f"{source} {what}",
        reason="receipt",
        hint="restore the receipt from the release, or name another with --receipt",
    )
