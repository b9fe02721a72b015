# SPDX-License-Identifier: Apache-2.0
"""Errors that end a command, each with its exit code."""

from __future__ import annotations

from b12x_overlay.console import CommandError
from b12x_overlay.exitcodes import ExitCode


class UsageError(CommandError):
    """Something that the user gave is wrong; the message names it and what is wanted."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, code=ExitCode.USAGE, reason="usage", hint=hint)


class RefusedError(CommandError):
    """The request is understood but would mix what does not belong together; nothing was changed."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, code=ExitCode.REFUSED, reason="refused", hint=hint)


class ServerError(CommandError):
    """The server cannot be measured, or did not come back after a restart."""

    def __init__(self, message: str, hint: str = "", detail: str = "") -> None:
        super().__init__(message, code=ExitCode.FAILED, reason="server", hint=hint, detail=detail)


class StoreError(CommandError):
    """The result folder cannot be read or written."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, code=ExitCode.FAILED, reason="store", hint=hint)
