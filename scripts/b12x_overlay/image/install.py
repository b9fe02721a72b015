# SPDX-License-Identifier: Apache-2.0
"""The one step of docker/Dockerfile: check the base, apply the patch set, write the manifest and the programs.

Runs inside the base with its own Python and the standard library only, from a read-only mount of this repository. The
settings come as environment variables, which the Dockerfile sets from its build arguments.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from b12x_overlay.console import CommandError, Console, guarded
from b12x_overlay.doctor import packages, provider
from b12x_overlay.image import content, integrity, manifest, programs
from b12x_overlay.image.content import Base
from b12x_overlay.image.expected import Expected, from_checkout
from b12x_overlay.image.integrity import State, Verdict
from b12x_overlay.patching import engine, installed
from b12x_overlay.patching.patchset import load, sha256
from b12x_overlay.paths import OVERLAY, PATCHES

_SHOWN = 20  # faults listed before "and N more"


def main() -> int:
    """Install into the Python that runs this; the environment has BASE_NAME and, if known, the other arguments."""
    console = Console(color="never")
    return guarded(console, lambda: install(os.environ, Path(manifest.FOLDER), console))


def install(environ: Mapping[str, str], folder: Path, console: Console) -> int:
    """Do everything; nothing is written before every check has passed.

    Raises:
        CommandError: the base is not what it has to be, or the arguments do not fit what is here.
    """
    base = Base(
        environ.get("BASE_NAME", ""),
        environ.get("BASE_DIGEST", ""),
        environ.get("BASE_INDEX_DIGEST", ""),
    )
    architecture = _architecture(environ.get("ARCH", ""))
    inputs = content.inputs(base, architecture)
    content_id = content.content_id(inputs)
    _check_id(environ.get("CONTENT_ID", ""), content_id)
    expected = from_checkout()
    console.say(
        f"checking the vllm of the base against its RECORD and patch set {expected.patchset}"
    )
    before = _check_base(expected, architecture)
    if folder.exists():
        raise CommandError(
            f"{folder} exists in the base: it already holds an overlay",
            hint="build on vllm/vllm-openai:v0.33.0",
        )
    outcome = engine.apply(installed.find(), load(PATCHES, OVERLAY))
    if outcome.code:
        raise CommandError(
            f"the patch set does not apply: {outcome.outcome}; {'; '.join(outcome.notes)}"
        )
    after = integrity.full(expected)
    if after.state is not State.PATCHED:
        raise CommandError(f"after patching vllm is {after.state}: {_list(after)}")
    assert before.site is not None
    files = _write(folder, expected, before.site, outcome.changed, inputs, content_id)
    console.say(f"patched {len(outcome.changed)} files in {after.folder}, {after.files} verified")
    console.say(
        f"content id {content_id}; {len(files)} files in the layer, listed in {folder / manifest.NAME}"
    )
    return 0


def _architecture(wanted: str) -> str:
    machine = platform.machine()
    names = {
        **{docker: name for name, docker in content.ARCHITECTURES.items()},
        **{n: n for n in content.ARCHITECTURES},
    }
    if wanted and names.get(wanted) != machine:
        raise CommandError(
            f"the base is for {machine}, asked for is {wanted}",
            reason="architecture",
            hint=f"give a base for {wanted}, or ask for {content.ARCHITECTURES.get(machine, machine)}",
        )
    return machine


def _check_id(wanted: str, found: str) -> None:
    if wanted and wanted != found:
        raise CommandError(
            f"CONTENT_ID is {wanted}, these files and arguments give {found}",
            reason="content-id",
            hint=f"build with scripts/build-image, or pass --build-arg CONTENT_ID={found}",
        )


def _check_base(expected: Expected, architecture: str) -> Verdict:
    verdict = integrity.full(expected)
    if verdict.state is State.ABSENT:
        raise CommandError(
            "the base has no vllm for its python3",
            hint="use vllm/vllm-openai:v0.33.0 as BASE_IMAGE",
        )
    if verdict.state is not State.STOCK:
        raise CommandError(
            f"the base's vllm {verdict.version} in {verdict.folder} is {verdict.state}, not stock "
            f"{expected.version}: {_list(verdict)}",
            reason="base",
            hint="use an unmodified vllm/vllm-openai:v0.33.0",
        )
    tags = _wheel_tags(verdict)
    if not any(tag.endswith((architecture, "-any")) for tag in tags):
        raise CommandError(
            f"the base's vllm was built for {', '.join(tags)}, this machine is {architecture}"
        )
    return verdict


def _wheel_tags(verdict: Verdict) -> list[str]:
    assert verdict.site is not None
    path = integrity.record_path(verdict.site, verdict.version).with_name("WHEEL")
    try:
        return re.findall(r"^Tag: *(\S+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return []


def _write(
    folder: Path,
    expected: Expected,
    site: Path,
    changed: list[str],
    inputs: dict[str, Any],
    content_id: str,
) -> list[dict[str, Any]]:
    """Write the folder; returns the manifest's list of files. Everything is readable for every user."""
    folder.mkdir(parents=True, mode=0o755)
    made = programs.write(folder, expected)
    cache = folder / "cache"
    cache.mkdir()
    cache.chmod(0o1777)  # the server may run as any user
    files = [
        {"path": str(site / path), "sha256": integrity.digest(site / path)}
        for path in sorted(changed)
    ]
    files += [{"path": str(folder / name), "sha256": sha256(data)} for name, data in made.items()]
    files.append({"path": str(folder / manifest.NAME), "sha256": ""})
    data = manifest.compose(inputs, content_id, _found(site), files)
    (folder / manifest.NAME).write_bytes(data)
    for path in (folder, folder / manifest.NAME):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return files


def _found(site: Path) -> dict[str, Any]:
    """What the base holds, as the manifest records it."""
    vllm, given = packages.find("vllm"), provider.detect()
    assert vllm is not None
    record = integrity.record_path(site, vllm.version)
    return {
        "python": platform.python_version(),
        "vllm": {"version": vllm.version, "folder": str(site / "vllm")},
        "packages": packages.versions(),
        "torch_cuda": packages.torch_cuda(),
        "b12x": {
            "provider": given.name,
            "version": given.version,
            "clash": given.clash,
            "label": given.label + (", clashing with another" if given.clash else ""),
        },
        "record": {"path": str(record), "sha256": integrity.digest(record)},
    }


def _list(verdict: Verdict) -> str:
    shown = [f"{fault.path} is {fault.what}" for fault in verdict.faults[:_SHOWN]]
    more = len(verdict.faults) - _SHOWN
    return "; ".join(shown) + (f"; and {more} more" if more > 0 else "")


if __name__ == "__main__":
    sys.exit(main())
