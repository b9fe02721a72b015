# SPDX-License-Identifier: Apache-2.0
"""Export: the OCI archive, its SBOM and the receipt that binds them together."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import tarfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from b12x_overlay import bootstrap
from b12x_overlay.console import CommandError, Console
from b12x_overlay.exitcodes import ExitCode
from b12x_overlay.image.engines import Engine, ImageInfo
from b12x_overlay.image.plan import Plan

SCHEMA = "b12x-overlay-receipt/1"


def export(
    plan: Plan,
    engine: Engine,
    info: ImageInfo,
    verdict: dict[str, Any],
    folder: Path,
    with_sbom: bool,
    console: Console,
) -> dict[str, Any]:
    """Write archive, SBOM and receipt into *folder*; each appears under its name only when it is whole.

    Raises:
        CommandError: a file of that name exists, or a step failed.
    """
    refuse_existing(plan, folder)
    stem = _stem(plan, folder)
    partial = stem.with_name(f".{stem.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        console.progress(f"exporting {plan.image}")
        engine.export(plan.image, partial, plan.tag)
        digest = manifest_digest(partial)
        kind = "oci" if digest else "docker"
        archive = stem.with_name(f"{stem.name}.{kind}.tar")
        made: dict[str, Any] = {"archive": _file(partial, archive.name), "manifest_digest": digest}
        if with_sbom:
            console.progress("making the SBOM with syft (half a minute)")
            text = sbom(partial, kind, plan)
            bill = stem.with_name(f"{stem.name}.cdx.json")
            made["sbom"] = {"file": bill.name, "sha256": hashlib.sha256(text).hexdigest()}
            _write(bill, text)
        document = compose(plan, engine, info, verdict, made)
        _write(
            stem.with_name(f"{stem.name}.receipt.json"),
            (json.dumps(document, indent=1) + "\n").encode(),
        )
        partial.replace(archive)
    finally:
        partial.unlink(missing_ok=True)
    return document


def refuse_existing(plan: Plan, folder: Path) -> None:
    """Make *folder*; an export of this very image must not be in it.

    Raises:
        CommandError: it is, or the folder cannot be made.
    """
    if folder.exists() and not folder.is_dir():
        raise CommandError(
            f"{folder} is no folder", reason="exists", hint="give a folder to --output"
        )
    folder.mkdir(parents=True, exist_ok=True)
    stem = _stem(plan, folder)
    for path in sorted(folder.glob(f"{stem.name}.*")):
        raise CommandError(
            f"{path} exists", reason="exists", hint="remove it, or give another --output"
        )


def _stem(plan: Plan, folder: Path) -> Path:
    return folder / f"{plan.name.rpartition('/')[2]}-{plan.tag}"


def compose(
    plan: Plan, engine: Engine, info: ImageInfo, verdict: dict[str, Any], files: dict[str, Any]
) -> dict[str, Any]:
    """The receipt: what was built from what by what, what was checked, and the files' digests."""
    return {
        "schema": SCHEMA,
        **plan.as_json(),
        "built": {
            "time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "engine": engine.name,
            "engine_version": engine.version(),
            "machine": platform.machine(),
            "image_id": info.id,
            "layers": info.layers,
        },
        "checked": {"verify": verdict["state"], "files_compared": verdict.get("files", 0)},
        "files": files,
    }


def manifest_digest(archive: Path) -> str:
    """The digest under which a registry will know the image; "" for a docker archive, which has none."""
    with tarfile.open(archive) as stream:
        try:
            member = stream.extractfile("index.json")
        except KeyError:
            return ""
        assert member is not None
        entries = json.load(member)["manifests"]
    return str(entries[0]["digest"]) if entries else ""


def sbom(archive: Path, kind: str, plan: Plan) -> bytes:
    """CycloneDX from syft, with this image as its subject.

    Raises:
        CommandError: syft cannot be set up, or fails.
    """
    try:
        tool = bootstrap.ensure("image").parent / "syft"
    except bootstrap.SetupError as error:
        raise CommandError(
            f"no SBOM: {error}", code=ExitCode.FAILED, reason="sbom", hint="leave it out: --no-sbom"
        ) from error
    command = [str(tool), "scan", "--quiet", "-o", "cyclonedx-json", f"{kind}-archive:{archive}"]
    environment = {**os.environ, "SYFT_CHECK_FOR_APP_UPDATE": "false"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        text = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise CommandError(
            f"syft ended with {result.returncode}: {text}", code=ExitCode.FAILED, reason="sbom"
        )
    document = json.loads(result.stdout)
    document.setdefault("metadata", {})["component"] = {
        "type": "container",
        "name": plan.name,
        "version": plan.tag,
        "properties": [
            {"name": "b12x-overlay:content-id", "value": plan.content_id},
            {"name": "b12x-overlay:patchset", "value": _patchset(plan)},
            {"name": "b12x-overlay:base-digest", "value": plan.base.digest},
        ],
    }
    for component in document.get("components", []):
        if (
            component.get("name") == "vllm"
        ):  # what syft finds is the stock release's name and version
            names = ", ".join(patch["name"] for patch in plan.inputs["patchset"]["patches"])
            component["pedigree"] = {
                "notes": f"modified by the b12x overlay, patch set {_patchset(plan)}: {names}"
            }
    return (json.dumps(document, indent=1) + "\n").encode()


def _patchset(plan: Plan) -> str:
    return str(plan.inputs["patchset"]["patchset"])


def _file(path: Path, name: str) -> dict[str, Any]:
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"file": name, "sha256": digest, "bytes": path.stat().st_size}


def _write(path: Path, data: bytes) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(data)
    partial.replace(path)
