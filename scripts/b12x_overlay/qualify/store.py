# SPDX-License-Identifier: Apache-2.0
"""The result on disk: always a whole, valid file; one writer at a time; resumable."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import ValidationError

from b12x_overlay.qualify.errors import RefusedError, StoreError, UsageError
from b12x_overlay.qualify.redact import Secrets
from b12x_overlay.qualify.schema import Result
from b12x_overlay.qualify.settings import explain

RESULT = "result.json"
_EVERY_SECONDS = 1.0


def load(path: Path) -> Result:
    """Read a result file.

    Raises:
        UsageError: not there, not JSON, or not a result of this schema.
        StoreError: it is there and cannot be read.
    """
    try:
        return Result.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(
            f"{path} does not exist; wanted a {RESULT} of scripts/qualify, or its folder"
        ) from error
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        raise UsageError(
            f"{path} is no result of scripts/qualify: {explain(error)[:300]}"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Replace *path* by *text* at once; a reader sees the old or the new file, never a part.

    Raises:
        StoreError: the folder cannot be written or is full.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StoreError(f"cannot write {path}: {error.strerror}") from error


def _foreign(folder: Path) -> list[str]:
    """Names in *folder* that no run of this program leaves there before its first result."""
    own = (".lock", f".{RESULT}.", "server-logs")
    return sorted(name for name in os.listdir(folder) if not name.startswith(own))  # noqa: PTH208


class Store:
    """A locked result folder."""

    def __init__(self, folder: Path, secrets: Secrets, name: str = RESULT) -> None:
        self.folder = folder
        self.path = folder / name
        self._secrets = secrets
        self._last = 0.0

    def __enter__(self) -> Self:
        self._made = not self.folder.exists()
        try:
            foreign = [] if self._made or self.path.exists() else _foreign(self.folder)
            if foreign:
                raise RefusedError(
                    f"{self.folder} holds other files ({', '.join(foreign[:3])}) and no {self.path.name}; "
                    "nothing was written",
                    "choose a new folder with --out",
                )
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self.folder / ".lock").open("w")
        except OSError as error:
            raise StoreError(
                f"cannot write {self.folder}: {error.strerror}; choose another with --out"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise StoreError(
                f"another run is writing to {self.folder}; wait for it, or choose another --out"
            ) from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.close()
        if os.listdir(self.folder) == [".lock"]:  # noqa: PTH208 (names are wanted)
            (self.folder / ".lock").unlink(missing_ok=True)
            if self._made:
                with contextlib.suppress(OSError):
                    self.folder.rmdir()

    def existing(self) -> Result | None:
        """The result that is there already, if any. Raises `RefusedError` for a file that is no result."""
        try:
            return load(self.path) if self.path.exists() else None
        except UsageError as error:
            raise RefusedError(str(error), "choose another folder with --out") from error

    def save(self, result: Result, *, now: bool = False) -> None:
        """Write *result* as of this moment; without *now* at most once a second."""
        if not now and time.monotonic() - self._last < _EVERY_SECONDS:
            return
        result.updated = datetime.now(UTC)
        self.put(result)
        self._last = time.monotonic()

    def put(self, result: Result) -> Result:
        """Write *result* without touching its time of measurement; returns what the file says, free of secrets."""
        cleaned = self._secrets.clean(json.loads(result.model_dump_json()), _words())
        write_text(self.path, json.dumps(cleaned, indent=1, ensure_ascii=False) + "\n")
        return Result.model_validate(cleaned)

    def write(self, name: str, text: str) -> None:
        """Write another file into the folder."""
        write_text(self.folder / name, text)


@functools.cache
def _words() -> frozenset[str]:
    """The values that the schema itself names: kinds of faults, verdicts, states."""

    def named(part: Any) -> set[str]:
        if isinstance(part, list):
            return set().union(*map(named, part))
        if not isinstance(part, dict):
            return set()
        values = [*part.get("enum", ()), part.get("const")]
        return {value for value in values if isinstance(value, str)} | named(list(part.values()))

    return frozenset(named(Result.model_json_schema()))
