# SPDX-License-Identifier: Apache-2.0
"""Exit codes shared by every command; README lists them once."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What a command's exit status says."""

    OK = 0
    """Done, or nothing to do."""
    DIFFERENT = 1
    """A check says no: not applied, would change, verdict failed, a fault was found."""
    USAGE = 2
    """The command line is wrong (argparse's own code)."""
    REFUSED = 3
    """Refused or in conflict: nothing was changed, the message names the way out."""
    FAILED = 4
    """An unexpected failure: input/output, network, a bug."""
    INTERRUPTED = 130
    """Stopped by Ctrl-C."""
