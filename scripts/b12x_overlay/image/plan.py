# SPDX-License-Identifier: Apache-2.0
"""What a build will do: base with its digests, content id, tag, build arguments. Made without building anything."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from b12x_overlay.console import CommandError
from b12x_overlay.exitcodes import ExitCode
from b12x_overlay.image import content, reference, registry
from b12x_overlay.image.content import Base
from b12x_overlay.image.engines import BuildRequest, Engine, ImageInfo, info_of
from b12x_overlay.image.reference import Reference
from b12x_overlay.paths import REPO

DEFAULT_BASE = "vllm/vllm-openai:v0.33.0"
DEFAULT_NAME = "b12x-overlay"
LINE = "v0.33.0-b12x"
_LAST_SECOND = "99999999999"  # in the year 5138; tags have four digits for it
_MACHINES = {docker: machine for machine, docker in content.ARCHITECTURES.items()}


@dataclass(frozen=True)
class Source:
    """The commit that the files come from: *revision* ends in "-dirty" with uncommitted changes."""

    revision: str
    epoch: int
    url: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """Everything that is settled before the build.

    Attributes:
        base_image: what FROM gets, pinned by digest where one is known.
        notes: what the user should know, in full sentences.
        base_info: the base's configuration, None if nobody could tell.
    """

    base: Base
    base_image: str
    architecture: str
    line: str
    date: str
    name: str
    content_id: str
    inputs: dict[str, Any]
    source: Source
    notes: tuple[str, ...]
    base_info: ImageInfo | None

    @property
    def resolved(self) -> bool:
        """The base's digest is known; without it the content id is not that of the image."""
        return bool(self.base.digest)

    @property
    def tag(self) -> str:
        """``<line>-<YYYYMMDD>-<first 16 hex digits of the content id>``."""
        return f"{self.line}-{self.date}-{self.content_id[:16]}"

    @property
    def image(self) -> str:
        """Name and tag."""
        return f"{self.name}:{self.tag}"

    def request(self) -> BuildRequest:
        """For an engine."""
        return BuildRequest(
            REPO, content.DOCKERFILE, self.image, f"linux/{content.ARCHITECTURES[self.architecture]}",
            self.arguments(), self.source.epoch,
        )  # fmt: skip

    def arguments(self) -> dict[str, str]:
        """The Dockerfile's build arguments."""
        created = datetime.fromtimestamp(self.source.epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {
            "BASE_IMAGE": self.base_image,
            "BASE_NAME": self.base.name,
            "BASE_DIGEST": self.base.digest,
            "BASE_INDEX_DIGEST": self.base.index_digest,
            "ARCH": content.ARCHITECTURES[self.architecture],
            "CONTENT_ID": self.content_id,
            "PATCHSET": str(self.inputs["patchset"]["patchset"]),
            "STATUS": content.STATUS[self.architecture],
            "VERSION": self.tag,
            "REVISION": self.source.revision,
            "CREATED": created,
            "SOURCE": self.source.url,
        }

    def as_json(self) -> dict[str, Any]:
        """For ``--print --json`` and the receipt."""
        return {
            "image": self.image,
            "tag": self.tag,
            "content_id": self.content_id,
            "architecture": self.architecture,
            "base": {**self.inputs["base"], "image": self.base_image, "resolved": self.resolved},
            "patchset": self.inputs["patchset"]["patchset"],
            "source": {
                "revision": self.source.revision,
                "url": self.source.url,
                "epoch": self.source.epoch,
            },
            "arguments": self.arguments(),
            "inputs": self.inputs,
            "notes": list(self.notes),
        }


def make(
    base: str, docker_arch: str, line: str, name: str, date: str, url: str, engine: Engine | None
) -> Plan:
    """Settle everything; *engine* is asked about local bases and may be None.

    Raises:
        CommandError: a malformed argument, a base for another architecture.
        ContentError, PatchSetError: this repository's files are not in order.
    """
    try:
        named = reference.parse(base)
    except reference.ReferenceError as error:
        raise CommandError(
            f"--base: {error}", code=ExitCode.USAGE, reason="base", hint=f"--base {DEFAULT_BASE}"
        ) from error
    machine = _MACHINES[docker_arch]
    source = _source(url)
    found = _resolve(named, docker_arch, engine)
    known = found.base
    inputs = content.inputs(known, machine)
    line = line or (LINE if machine == "x86_64" else f"{LINE}-{docker_arch}")
    day = date or datetime.fromtimestamp(source.epoch, UTC).strftime("%Y%m%d")
    if not _is_day(day):
        text = f"--date {day!r} is no day YYYYMMDD"
        raise CommandError(
            text, code=ExitCode.USAGE, reason="date", hint="give it as 20261231, or leave it out"
        )
    if not reference.is_tag(f"{line}-{day}-{'0' * 16}"):
        text = f"line {line!r} and date {day!r} make no tag <line>-<YYYYMMDD>-<content id>"
        raise CommandError(
            text,
            code=ExitCode.USAGE,
            reason="tag",
            hint="give --line letters, digits, '.', '_', '-'",
        )
    try:
        reference.repository(name)
    except reference.ReferenceError as error:
        raise CommandError(
            f"--name: {error}",
            code=ExitCode.USAGE,
            reason="name",
            hint="give registry/repository in small letters; the tag comes from --line and --date",
        ) from error
    identity = content.content_id(inputs)
    notes = (*source.notes, *found.notes)
    return Plan(
        known, found.image, machine, line, day, name, identity, inputs, source, notes, found.info
    )


def _is_day(text: str) -> bool:
    try:
        return datetime.strptime(text, "%Y%m%d").strftime("%Y%m%d") == text
    except ValueError:
        return False


@dataclass(frozen=True)
class _Found:
    """A base that was looked up: *image* is what FROM gets."""

    base: Base
    image: str
    info: ImageInfo | None = None
    notes: tuple[str, ...] = ()


def _resolve(named: Reference, arch: str, engine: Engine | None) -> _Found:
    """Ask the registry, or for local names and without a network the engine."""
    if named.local:
        return _here(named, arch, engine) or _Found(
            Base(named.full, named.digest),
            named.at(named.digest) if named.digest else named.full,
            notes=(
                f"{named.full} is not an image that {engine.name if engine else 'any engine'} has here",
            ),
        )
    try:
        found = registry.resolve(named, arch)
    except registry.PlatformError as error:
        raise CommandError(
            str(error), reason="architecture", hint="give --arch, or another --base"
        ) from error
    except registry.RegistryError as error:
        here = _here(named, arch, engine)
        if here is not None:
            note = f"{error}; the digest is the one that {engine.name if engine else ''} pulled, its index is not known"
            return _Found(here.base, here.image, here.info, (*here.notes, note))
        if named.digest:
            note = f"{error}; the digest is taken as given, the index it belongs to is not known"
            return _Found(Base(named.full, named.digest), named.at(named.digest), notes=(note,))
        return _Found(
            Base(named.full),
            named.full,
            notes=(f"{error}; give --base NAME@sha256:..., or go on line",),
        )
    commit = found.labels.get("ai.vllm.build.commit", "")
    notes = []
    if commit and not commit.startswith("4ba787ec9"):
        notes.append(
            f"the base says that its vllm is commit {commit}, the patch set is for 4ba787ec9"
        )
    base = Base(named.full, found.digest, found.index_digest)
    return _Found(base, named.at(found.digest), info_of(found.config, found.digest), tuple(notes))


def _here(named: Reference, arch: str, engine: Engine | None) -> _Found | None:
    """The base as the engine has it, None if it has not."""
    text = named.at(named.digest) if named.digest else named.full
    info = engine.inspect(text) if engine is not None else None
    if info is None:
        return None
    if info.architecture != arch:
        raise CommandError(
            f"{text} is for {info.architecture}, asked for is {arch}",
            reason="architecture",
            hint=f"give --arch {info.architecture}, or another --base",
        )
    if not info.digest:
        note = f"{text} has no digest: it never came from a registry"
        return _Found(Base(named.full), text, info, (note,))
    return _Found(Base(named.full, info.digest), named.at(info.digest), info)


def _source(url: str) -> Source:
    """Commit, time and address of this checkout; SOURCE_DATE_EPOCH wins over the commit's time."""
    notes = []
    given = os.environ.get("SOURCE_DATE_EPOCH", "")
    if given and not (given.isascii() and given.isdigit() and len(given) <= len(_LAST_SECOND)):
        raise CommandError(
            f"SOURCE_DATE_EPOCH={given!r} is no number of seconds up to {_LAST_SECOND}",
            code=ExitCode.USAGE,
            reason="epoch",
            hint="unset SOURCE_DATE_EPOCH, or set it to the output of: git log -1 --format=%ct",
        )
    revision, epoch = _git("rev-parse", "HEAD"), _git("log", "-1", "--format=%ct")
    if not revision or not epoch:
        notes.append(
            "git reads no commit here (no checkout, or another owner's): the revision is not known"
            + ("" if given else ", the date is today's")
        )
        today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        return Source("unknown", int(given or today.timestamp()), url, tuple(notes))
    # Only what can reach the image counts.
    changed = _git(
        "status", "--porcelain", "--", "changes", "docker", "overlay", "patches", "scripts"
    )
    if changed:
        revision += "-dirty"
        notes.append(
            "there are uncommitted changes: the revision is marked dirty and names no commit anyone can get"
        )
    address = url or _public(_git("remote", "get-url", "origin"))
    if not address:
        notes.append("no public address is known: the source label stays empty (give --source URL)")
    return Source(revision, int(given or epoch), address, tuple(notes))


def _git(*arguments: str) -> str:
    if shutil.which("git") is None:
        return ""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(REPO), *arguments]
    result = subprocess.run(command, env=clean, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else ""


def _public(remote: str) -> str:
    """An https address for a remote, without credentials; "" for a path on this machine."""
    match = re.fullmatch(
        r"(?:https?://(?:[^@/]*@)?|(?:ssh://)?git@)([^/:]+\.[^/:]+)[/:](.+?)(?:\.git)?/?", remote
    )
    return f"https://{match[1]}/{match[2]}" if match else ""


def describe(plan: Plan, engine: Engine | None, say: Callable[[str], None]) -> None:
    """The plan for people."""
    request = plan.request()
    rows = [
        ("image", plan.image),
        ("architecture", f"{plan.architecture} ({content.STATUS[plan.architecture]})"),
        ("base", plan.base.name),
        ("base digest", plan.base.digest or "not known"),
        ("index digest", plan.base.index_digest or "none known"),
        (
            "content id",
            plan.content_id
            + ("" if plan.resolved else " (will differ: the base's digest is not known)"),
        ),
        ("patch set", str(plan.inputs["patchset"]["patchset"])),
        ("patches", ", ".join(patch["name"] for patch in plan.inputs["patchset"]["patches"])),
        ("source", f"{plan.source.revision} {plan.source.url}".strip()),
        ("engine", f"{engine.name} ({engine.version()})" if engine else "none works here"),
    ]
    for label, value in rows:
        say(f"{label:<13} {value}")
    if engine is not None:
        say("")
        variables = " ".join(
            f"{name}={value}" for name, value in engine.environment(request).items()
        )
        say(f"{variables} {_quoted(engine.build_command(request))}".strip())


def _quoted(command: list[str]) -> str:
    import shlex

    return " \\\n  ".join(shlex.join(part) for part in _grouped(command))


def _grouped(command: list[str]) -> list[list[str]]:
    """A flag and its value share a line."""
    groups: list[list[str]] = [[]]
    for word in command:
        if word.startswith("-") and groups[-1]:
            groups.append([])
        groups[-1].append(word)
    return groups
