# SPDX-License-Identifier: Apache-2.0
"""Finds the vllm that this Python imports, without importing vllm or torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

from b12x_overlay.console import CommandError
from b12x_overlay.patching import again
from b12x_overlay.patching.target import FolderTarget, at_folder, installed_at
from b12x_overlay.patching.tree import Tree


def find() -> FolderTarget:
    """The folder that ``import vllm`` would take, as a target.

    Import metadata decides (``find_spec`` and the distribution's RECORD), so that dist-packages, user folders,
    PYTHONPATH and editable installs are seen as Python sees them. With an editable install the target is its source
    tree, whatever stale copy lies in site-packages.

    Raises:
        CommandError: no vllm, or one without files.
    """
    if sys.flags.no_site:  # python -S: add what an ordinary start of this Python would
        import site

        site.main()
    folder = _package_folder()
    if folder.is_symlink():
        raise CommandError(
            f"{folder} is a symbolic link to {folder.readlink()}; links are not followed",
            reason="symlink",
            hint=again.command("apply", folder.resolve().parent),
        )
    for distribution in importlib.metadata.distributions(name="vllm"):
        if Path(str(distribution.locate_file("vllm"))).resolve() == folder.resolve():
            info = getattr(distribution, "_path", None)
            if isinstance(info, Path) and info.name.endswith(".dist-info"):
                return installed_at(Tree(folder.parent), info.resolve())
    return at_folder(folder.parent)


def _package_folder() -> Path:
    spec = importlib.util.find_spec("vllm")
    if spec is None:
        raise CommandError(
            f"{sys.executable} has no vllm to import",
            reason="no-target",
            hint="run the command with the Python that serves vLLM: /path/to/venv/bin/python scripts/apply-patches "
            "--target installed",
        )
    if not spec.origin or not spec.origin.endswith("__init__.py"):
        places = ", ".join(spec.submodule_search_locations or [])
        raise CommandError(
            f"vllm is a folder without __init__.py ({places}): leftovers of an uninstalled vLLM",
            reason="leftover-overlay",
            hint=f"remove {places}, then install the pinned vLLM",
        )
    return Path(spec.origin).parent
