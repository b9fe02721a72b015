# SPDX-License-Identifier: Apache-2.0
"""Moves a command that needs libraries into its environment, and says what else helps where there is none."""

from __future__ import annotations

import os

from b12x_overlay import bootstrap
from b12x_overlay.console import CommandError
from b12x_overlay.exitcodes import ExitCode


def enter(hint: str = "") -> None:
    """Go on in the environment ``apply``, made first if need be; *hint* is the way round it.

    Raises:
        CommandError: it cannot be made, or is another user's.
    """
    other = "set B12X_OVERLAY_BUILD to a folder of your own"
    try:
        python = bootstrap.ensure("apply")
    except bootstrap.SetupError as error:
        raise CommandError(
            str(error), code=ExitCode.FAILED, reason="environment", hint=hint or other
        ) from error
    if not os.access(python, os.X_OK):
        raise CommandError(
            f"{python} cannot be run by this user",
            code=ExitCode.FAILED,
            reason="environment",
            hint=other,
        )
    bootstrap.reexec("apply")
