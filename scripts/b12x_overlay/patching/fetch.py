# SPDX-License-Identifier: Apache-2.0
"""Fetches source distributions of vLLM into build/sources, checked by sha256.

The library unearth does the fetching (``pip download`` fails on vLLM's source distribution, because it builds
metadata first); its environment is made on first use.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Callable
from pathlib import Path

from b12x_overlay.console import CommandError
from b12x_overlay.exitcodes import ExitCode
from b12x_overlay.patching import lock
from b12x_overlay.patching.patchset import Artifact, Pin
from b12x_overlay.patching.sources import default_tree, sources

Say = Callable[[str], None]


def file_sha256(path: Path) -> str:
    """Digest of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def pinned_tree(pin: Pin, say: Say) -> Path:
    """The unpacked pinned source distribution, fetched and unpacked if need be.

    Raises:
        CommandError: no network, or the file's sha256 is not the pinned one.
    """
    tree = default_tree(pin)
    if tree.is_dir():
        return tree
    folder = sources()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(
            f"{folder} cannot be made: {error.strerror}",
            code=ExitCode.FAILED,
            reason="not-writable",
            hint="set B12X_OVERLAY_BUILD to a folder that can be written, or give --target",
        ) from error
    archive = folder / pin.sdist.filename
    if not archive.exists():
        from b12x_overlay.patching import environment

        environment.enter(f"with {archive.name} in {folder} no environment is needed")
    with lock.exclusive(folder, lambda: say(f"waiting for another run that fetches into {folder}")):
        if tree.is_dir():
            return tree
        if not archive.exists():
            say(f"fetching {pin.sdist.filename}")
            download("vllm", pin.version, folder, pin.sdist.sha256, say)
        check(archive, pin.sdist)
        from b12x_overlay.patching.unpack import unpack

        say(f"unpacking {archive.name}")
        unpack(archive, tree)
    return tree


def check(path: Path, artifact: Artifact) -> None:
    """Compare a download with its pin.

    Raises:
        CommandError: another sha256.
    """
    found = file_sha256(path)
    if found != artifact.sha256:
        raise CommandError(
            f"{path} has sha256 {found}, wanted {artifact.sha256}",
            reason="bad-download",
            hint=f"rm {shlex.quote(str(path))}, then run the command again",
        )


def download(project: str, version: str, folder: Path, sha256: str | None, say: Say) -> Path:
    """Fetch the source distribution of *project* *version*; the index names the sha256 where the caller cannot.

    The caller runs in the environment ``apply``. PIP_INDEX_URL names another index.

    Raises:
        CommandError: not found, no network, another sha256.
    """
    from unearth import HashMismatchError, PackageFinder, UnpackError

    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple/")
    finder = PackageFinder(index_urls=[index], no_binary=[project], ignore_compatibility=True)
    try:
        best = finder.find_best_match(f"{project}=={version}", allow_yanked=True).best
        if best is None:
            raise CommandError(
                f"{index} has no source distribution of {project} {version}",
                hint=f"check the version, or put {project}-{version}.tar.gz into {folder} yourself",
                reason="not-found",
            )
        hashes = {"sha256": [sha256]} if sha256 else best.link.hash_option
        return Path(finder.download(best.link, folder, hashes, _reporter(say)))
    except HashMismatchError as error:
        raise CommandError(
            f"{project} {version} from {index}: {error}", reason="bad-download"
        ) from error
    except (UnpackError, OSError) as error:
        raise _no_network(index, folder, error) from error
    except Exception as error:  # httpx2's own classes, which only exist in that environment
        if type(error).__module__.partition(".")[0] in ("httpx2", "httpcore2"):
            raise _no_network(index, folder, error) from error
        raise


def _no_network(index: str, folder: Path, error: Exception) -> CommandError:
    return CommandError(
        f"cannot fetch from {index}: {error}",
        code=ExitCode.FAILED,
        reason="network",
        hint=f"check the network, set PIP_INDEX_URL to a mirror, or put the file into {folder} yourself",
    )


def _reporter(say: Say) -> Callable[[object, int, int | None], None]:
    said = 0

    def report(_link: object, completed: int, total: int | None) -> None:
        nonlocal said
        percent = 100 * completed // total if total else 0
        if percent >= said + 25:
            said = percent - percent % 25
            say(f"  {said}% of {(total or 0) / 1e6:.0f} MB")

    return report
