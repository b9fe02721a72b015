# SPDX-License-Identifier: Apache-2.0
"""Writes the next command out, so that it can be pasted."""

from __future__ import annotations

import shlex
import sys
from os import PathLike


def command(verb: str, target: str | PathLike[str] | None = None, *flags: str) -> str:
    """``scripts/apply-patches VERB --target TARGET`` as a shell reads it; apply, the default, is left out.

    For the word ``installed`` the Python that runs now is named: the shebang's would find another vLLM, or none.
    """
    words = ["scripts/apply-patches"]
    if target == "installed":
        words.insert(0, sys.executable)
    if verb != "apply":
        words.append(verb)
    words += flags
    if target is not None:
        words += ["--target", str(target)]
    return shlex.join(words)
