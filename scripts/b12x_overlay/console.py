# SPDX-License-Identifier: Apache-2.0
"""What every command shares at the terminal: messages, tables, colour, the one place where errors end.

Human text goes to stderr where a command prints machine output (``--json``), else to stdout; errors and progress
always go to stderr. Standard library only.

Output never decides what a command does: a reader that has gone (``| head``), a closed descriptor and an encoding that
lacks a character cost text, not work, and the exit code stays that of the work. Only a result that cannot be written
to stdout (a full disk) is an error of its own, exit code 4.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn, TextIO

from b12x_overlay.exitcodes import ExitCode

_COLOURS = {"red": "31", "green": "32", "yellow": "33", "bold": "1", "dim": "2"}

EXIT_CODE_HELP = """exit codes:
  0    done, or nothing to do
  1    a check says no: not applied, would change, a fault found
  2    usage
  3    refused or in conflict; nothing was changed
  4    unexpected failure (input/output, network, a bug)
  130  interrupted"""


class CommandError(Exception):
    """An error with its exit code; the message names the file, what was wanted, what was found, what to do.

    *detail* is for the terminal alone: further lines that may hold what does not belong into a file.
    """

    def __init__(
        self,
        message: str,
        *,
        code: ExitCode = ExitCode.REFUSED,
        reason: str = "refused",
        hint: str = "",
        detail: str = "",
    ) -> None:
        super().__init__(message)
        self.detail = detail
        self.code = code
        self.reason = reason
        self.hint = hint


class Console:
    """Writes human text with or without colour, quietly or in detail, and JSON on stdout."""

    def __init__(self, *, color: str = "auto", verbosity: int = 0, as_json: bool = False) -> None:
        self.verbosity = verbosity
        self.as_json = as_json
        self._color = color
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")

    @property
    def out(self) -> TextIO | None:
        """Where human text goes; None where the caller closed it."""
        return sys.stderr if self.as_json else sys.stdout

    def paint(self, text: str, colour: str, stream: TextIO | None = None) -> str:
        """*text* in *colour* where *stream* (default: the human output) shows colour."""
        if not _use_colour(self._color, stream or self.out):
            return text
        return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"

    def say(self, text: str = "") -> None:
        """A result line; silent with -q."""
        if self.verbosity >= 0:
            _write(self.out, f"{text}\n")

    def detail(self, text: str) -> None:
        """A line for -v, on stderr."""
        if self.verbosity > 0:
            _write(sys.stderr, f"{text}\n")

    def progress(self, text: str) -> None:
        """What a long step is doing, on stderr; silent with -q."""
        if self.verbosity >= 0:
            _write(sys.stderr, f"{text}\n")

    def error(self, text: str, hint: str = "") -> None:
        """An error, always shown, on stderr."""
        _write(sys.stderr, f"{self.paint('error:', 'red', sys.stderr)} {text}\n")
        if hint:
            _write(sys.stderr, f"{self.paint('next:', 'bold', sys.stderr)} {hint}\n")

    def json(self, value: Any) -> None:
        """The machine output: one JSON document on stdout, only with --json."""
        if self.as_json:
            _write(sys.stdout, json.dumps(value, indent=2, sort_keys=False) + "\n")

    def table(
        self,
        rows: Sequence[Sequence[str]],
        header: Sequence[str],
        colour: Callable[[str], str] | None = None,
    ) -> None:
        """Left-aligned columns; *colour* maps a cell of the last column to a colour name or ''."""
        if self.verbosity < 0:
            return
        widths = [max(len(str(row[i])) for row in [header, *rows]) for i in range(len(header))]
        _write(self.out, self.paint(_row(header, widths), "bold") + "\n")
        for row in rows:
            line = _row(row, widths)
            name = colour(row[-1]) if colour else ""
            if name:
                line = line[: len(line) - len(row[-1])] + self.paint(row[-1], name)
            _write(self.out, f"{line}\n")


class Parser(argparse.ArgumentParser):
    """An argument parser whose usage errors are JSON too where ``--json`` was among the arguments.

    Attributes:
        always: what the command's JSON holds besides the error whenever it fails.
    """

    always: Mapping[str, Any] = MappingProxyType({})
    _seen: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does it; remembers the arguments for ``error``."""
        self._seen = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Usage and *message* on stderr, the error as JSON on stdout if asked for, exit code 2."""
        hint = f"{self.prog} --help"
        console = Console(as_json="--json" in self._seen)
        _error_as_json(console, "usage", message, hint, self.always)
        super().error(message)


def add_common_flags(parser: argparse.ArgumentParser) -> None:
    """``--json``, ``--color``, ``-v``, ``-q`` as every command has them."""
    parser.add_argument(
        "--json", action="store_true", help="machine output on stdout, human text on stderr"
    )
    parser.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="default: auto; NO_COLOR is honoured",
    )
    loudness = parser.add_mutually_exclusive_group()
    loudness.add_argument("-v", "--verbose", action="store_true", help="say more")
    loudness.add_argument("-q", "--quiet", action="store_true", help="only errors")


def console_from(args: argparse.Namespace) -> Console:
    """The console that the common flags ask for."""
    return Console(
        color=args.color, verbosity=int(args.verbose) - int(args.quiet), as_json=args.json
    )


def guarded(console: Console, run: Callable[[], int]) -> int:
    """Run a command's body and turn its exceptions into messages and exit codes."""
    try:
        return int(run())
    except CommandError as error:
        _error_as_json(console, error.reason, str(error), error.hint)
        console.error(str(error) + error.detail, error.hint)
        return int(error.code)
    except KeyboardInterrupt:
        console.error("interrupted")
        return int(ExitCode.INTERRUPTED)
    except (
        BrokenPipeError
    ):  # of a stream that the command itself wrote to; see _write for all others
        _discard(sys.stdout)
        return int(ExitCode.OK)
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        return _failed(
            console, "io", f"{name}{error.strerror or error}", trace=console.verbosity > 0
        )
    except Exception as error:
        return _failed(console, "bug", f"unexpected {type(error).__name__}: {error}", trace=True)


def _failed(console: Console, reason: str, message: str, *, trace: bool) -> int:
    if trace:
        import traceback

        traceback.print_exc()
    _error_as_json(console, reason, message, "")
    console.error(message)
    return int(ExitCode.FAILED)


def _error_as_json(
    console: Console, reason: str, message: str, hint: str, always: Mapping[str, Any] | None = None
) -> None:
    with contextlib.suppress(CommandError):  # stdout takes nothing; stderr still says it
        error = {"reason": reason, "message": message, "next": hint}
        console.json({**(always or {}), "error": error})


def _write(stream: TextIO | None, text: str) -> None:
    """Write *text*, or lose it: see the module's words on output.

    Raises:
        CommandError: stdout takes nothing although somebody reads it.
    """
    if stream is None:  # closed by the caller: >&-
        return
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        _discard(stream)
        if stream is sys.stdout and not isinstance(error, BrokenPipeError):
            raise CommandError(
                f"standard output: {error.strerror or error}", code=ExitCode.FAILED, reason="io"
            ) from error


def _discard(stream: TextIO | None) -> None:
    """From here on *stream* swallows what is written, also what Python flushes at its end."""
    if stream is not None:
        with contextlib.suppress(OSError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)


def _use_colour(choice: str, stream: TextIO | None) -> bool:
    if stream is None:
        return False
    if choice != "auto":
        return choice == "always"
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(
        str(cell).ljust(width) for cell, width in zip(cells, widths, strict=True)
    ).rstrip()
