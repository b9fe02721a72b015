# SPDX-License-Identifier: Apache-2.0
"""What the command line says about the servers, checked before anything is contacted or written."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from b12x_overlay.qualify.address import Address
from b12x_overlay.qualify.documents import Document, read_document
from b12x_overlay.qualify.errors import UsageError
from b12x_overlay.qualify.plan_options import variables
from b12x_overlay.qualify.promises import QUESTIONS
from b12x_overlay.qualify.redact import Secrets, redact
from b12x_overlay.qualify.schema import ArmName
from b12x_overlay.qualify.variables import private


@dataclass(frozen=True)
class Side:
    """One arm as the command line gives it."""

    name: ArmName
    label: str
    address: Address
    model: str | None
    documents: tuple[Document, ...]
    """Image manifest, doctor report."""
    log: Path | None
    environment: dict[str, str] = field(default_factory=dict)
    """Variables for --restart."""


def single(options: argparse.Namespace) -> list[Side]:
    """The one side of 'run'. Raises `UsageError`."""
    return [_side(options, "A", "server", options.address, "", {})]


def pair(options: argparse.Namespace) -> list[Side]:
    """The two sides of 'ab'. Raises `UsageError`."""
    if bool(options.restart) == bool(options.address_b):
        raise UsageError("give either a second address, or --restart COMMAND")
    a, b = variables(options.env_a), variables(options.env_b)
    if options.restart is None:
        if a or b:
            raise UsageError(
                "--env-a and --env-b need --restart: a running server's variables cannot be changed"
            )
    else:
        restart_command(options.restart)
        if options.question:
            asked = QUESTIONS[options.question]
            a.setdefault(asked.variable, asked.a)
            b.setdefault(asked.variable, asked.b)
        if a == b:
            raise UsageError(
                "A and B have the same variables: give --env-a and --env-b, or --question"
            )
    sides = [
        _side(options, "A", options.label_a, options.address, "_a", a),
        _side(options, "B", options.label_b, options.address_b or options.address, "_b", b),
    ]
    if options.restart is None and sides[0].address == sides[1].address:
        raise UsageError("A and B are the same address: to compare two set-ups, give --restart")
    return sides


def restart_command(text: str) -> list[str]:
    """The words of --restart; no shell is involved.

    Raises:
        UsageError: empty, with an unclosed quote, or nothing that can be run.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--restart: {error}: {text}") from error
    if not words:
        raise UsageError("--restart is empty")
    if shutil.which(words[0]) is None:
        raise UsageError(
            f"--restart: {words[0]} is no command that can be run here; wanted a program on PATH or the path of an "
            "executable file (no shell is involved: sh -c '...' for one)"
        )
    return words


def api_key(options: argparse.Namespace) -> str | None:
    """The key, from the named variable. Raises `UsageError`."""
    if options.api_key_env is None:
        return None
    key = os.environ.get(options.api_key_env, "").strip()
    if not key:
        raise UsageError(f"--api-key-env: the variable {options.api_key_env} is not set")
    if not key.isascii() or not key.isprintable():
        raise UsageError(f"--api-key-env: {options.api_key_env} is no key: it has odd characters")
    return key


def authority(options: argparse.Namespace) -> str | None:
    """The file of --ca-file. Raises `UsageError` where it holds no certificate."""
    if options.ca_file is None:
        return None
    try:
        ssl.create_default_context(cafile=options.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"--ca-file {options.ca_file}: {error}") from error
    return str(options.ca_file)


def secrets_of(sides: list[Side], key: str | None) -> Secrets:
    """What must not be in any file that is written."""
    literals = [(str(Path.home()), "<home>")] if len(str(Path.home())) > len("/root") else []
    for side in sides:
        host = side.address.base.host
        literals.append((side.address.netloc, "<address>"))
        if any(character in host for character in ".-0123456789"):
            literals.append((host, "<host>"))  # a bare word such as 'vllm' may be part of a name
        # A server may repeat what it was started with, in an error for one.
        literals += [(value, "<set>") for value in private(side.environment)]
    if key:
        literals.append((key, "<key>"))
    return Secrets(literals)


def _side(
    options: argparse.Namespace,
    name: ArmName,
    label: str,
    address: str,
    suffix: str,
    environment: dict[str, str],
) -> Side:
    identities: list[Path] = getattr(options, f"identity{suffix}")
    log: Path | None = getattr(options, f"server_log{suffix}")
    if log is not None and not log.is_file():
        raise UsageError(f"--server-log: {log} is no file")
    return Side(
        name=name,
        label=redact(label),
        address=Address.parse(address),
        model=getattr(options, f"model{suffix}"),
        documents=tuple(read_document(path) for path in identities),
        log=log,
        environment=environment,
    )
