# SPDX-License-Identifier: Apache-2.0
"""The bytes that a patched and a stock vLLM have, as far as the patch set says: a small JSON that travels.

In a checkout it is made from patches/ and overlay/; in the single-file programs it is the file ``expected.json``
inside the archive, so that they need nothing beside them.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path

from b12x_overlay.console import CommandError
from b12x_overlay.exitcodes import ExitCode

NAME = "expected.json"


@dataclass(frozen=True)
class Expected:
    """The patch set's view of a vLLM.

    Attributes:
        version: of vLLM.
        patchset: id of the patch set.
        before: path ("vllm/envs.py") -> sha256 of upstream's bytes.
        after: the same paths -> sha256 of the patched bytes.
        added: overlay files and the marker module -> sha256.
    """

    version: str
    commit: str
    patchset: str
    before: dict[str, str]
    after: dict[str, str]
    added: dict[str, str]

    def to_json(self) -> bytes:
        """For the archive; the same set gives the same bytes."""
        return (json.dumps(asdict(self), indent=1, sort_keys=True) + "\n").encode()


def load() -> Expected:
    """From the archive that this code runs from, or from the checkout."""
    archive = _archive()
    if archive is not None:
        with zipfile.ZipFile(archive) as packed:
            return Expected(**json.loads(packed.read(NAME)))
    return from_checkout()


def load_or_refuse() -> Expected:
    """:func:`load`, for commands.

    Raises:
        CommandError: patches/ and overlay/ are not in order.
    """
    try:
        return load()
    except (ValueError, KeyError) as error:  # a damaged archive
        raise CommandError(
            f"this program is damaged: {error}", code=ExitCode.FAILED, reason="damaged"
        ) from error
    except Exception as error:
        if type(error).__name__ != "PatchSetError":  # its module is not in the archive
            raise
        raise CommandError(
            str(error), reason="bad-patch-set", hint="scripts/apply-patches list"
        ) from error


def from_checkout() -> Expected:
    """From patches/ and overlay/.

    Raises:
        PatchSetError: they are not in order.
    """
    from b12x_overlay.patching import manifest, patchset
    from b12x_overlay.paths import OVERLAY, PATCHES

    patch_set = patchset.load(PATCHES, OVERLAY)
    added = {file.path: file.sha256 for file in patch_set.overlay}
    added[patchset.MARKER] = patchset.sha256(manifest.render(patch_set))
    return Expected(
        patch_set.pin.version,
        patch_set.pin.commit,
        manifest.patchset_id(patch_set),
        {path: chain[0].before for path, chain in patch_set.chains.items()},
        {path: chain[-1].after for path, chain in patch_set.chains.items()},
        added,
    )


def _archive() -> Path | None:
    """The zip file that this module was imported from."""
    archive = getattr(globals().get("__loader__"), "archive", None)
    return Path(archive) if archive else None
