# SPDX-License-Identifier: Apache-2.0
"""The programs that build images: buildx bake, docker build, podman and buildah, behind one interface."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from b12x_overlay.console import CommandError
from b12x_overlay.exitcodes import ExitCode


@dataclass(frozen=True)
class BuildRequest:
    """One build: *base* and *args* are build arguments, *epoch* the time stamp of every file and of the image."""

    context: Path
    dockerfile: Path
    tag: str
    platform: str
    args: dict[str, str]
    epoch: int


@dataclass(frozen=True)
class ImageInfo:
    """What an engine says of a local image."""

    id: str
    digest: str
    architecture: str
    user: str
    workdir: str
    entrypoint: list[str]
    cmd: list[str]
    labels: dict[str, str]
    env: list[str]
    layers: list[str]


class Engine(ABC):
    """An installed builder that works here."""

    name: str
    binary: str

    def version(self) -> str:
        """One line, "" if the program is missing or does not answer."""
        result = _run([*self.command(), "--version"], check=False)
        return (
            result.stdout.strip().splitlines()[0]
            if result.returncode == 0 and result.stdout.strip()
            else ""
        )

    def command(self) -> list[str]:
        """The program with its own options."""
        return [self.binary]

    def unusable(self) -> str:
        """Why it cannot be used here, "" if it can."""
        if shutil.which(self.binary) is None:
            return f"{self.binary} is not installed"
        return "" if self.version() else f"{' '.join(self.command())} does not run"

    @abstractmethod
    def build_command(self, request: BuildRequest) -> list[str]:
        """The command line that builds *request*."""

    def environment(self, request: BuildRequest) -> dict[str, str]:
        """Variables that the build command needs besides the present ones."""
        return {}

    def prepare(self, request: BuildRequest) -> None:  # noqa: B027 (most engines read no file)
        """Write the files that the build command reads."""

    @abstractmethod
    def inspect(self, image: str) -> ImageInfo | None:
        """The local image *image*, None if there is none."""

    @abstractmethod
    def run_python(self, image: str, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run ``python3 arguments`` in a container of *image* without network, and remove the container."""

    @abstractmethod
    def export(self, image: str, target: Path, tag: str) -> None:
        """Write *image* to *target*, as an OCI archive where the engine can."""


class _Docker(Engine):
    name, binary = "docker", "docker"

    def unusable(self) -> str:
        missing = super().unusable()
        if missing:
            return missing
        result = _run(["docker", "info", "--format", "{{.ServerVersion}}"], check=False)
        return (
            "" if result.returncode == 0 else "docker has no engine: " + _last_line(result.stderr)
        )

    def build_command(self, request: BuildRequest) -> list[str]:
        command = ["docker", "build", "--network", "none", "--platform", request.platform]
        for name, value in request.args.items():
            command += ["--build-arg", f"{name}={value}"]
        return [*command, "-f", str(request.dockerfile), "-t", request.tag, str(request.context)]

    def environment(self, request: BuildRequest) -> dict[str, str]:
        return {"DOCKER_BUILDKIT": "1", "SOURCE_DATE_EPOCH": str(request.epoch)}

    def inspect(self, image: str) -> ImageInfo | None:
        result = _run([self.binary, "image", "inspect", image], check=False)
        if result.returncode != 0:
            return None
        entry = json.loads(result.stdout)[0]
        digests = [text.partition("@")[2] for text in entry.get("RepoDigests") or []]
        return _info(
            entry["Id"],
            digests[0] if digests else "",
            entry,
            entry["Config"],
            entry["RootFS"]["Layers"],
        )

    def run_python(self, image: str, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        command = [
            self.binary,
            "run",
            "--rm",
            "--network",
            "none",
            "--entrypoint",
            "python3",
            image,
            *arguments,
        ]
        return _run(command, check=False)

    def export(self, image: str, target: Path, tag: str) -> None:
        # Docker 25 and newer save the OCI layout, older ones Docker's own.
        _run([self.binary, "image", "save", "-o", str(target), image])
        target.chmod(0o644)  # docker makes it private


class _Buildx(_Docker):
    name = "buildx"

    def unusable(self) -> str:
        missing = super().unusable()
        if missing:
            return missing
        result = _run(["docker", "buildx", "version"], check=False)
        return "" if result.returncode == 0 else "docker has no buildx plugin"

    def bake_file(self, request: BuildRequest) -> Path:
        """Where the definition goes."""
        return request.context / "build" / "image" / "bake.json"

    def definition(self, request: BuildRequest) -> dict[str, Any]:
        """What ``docker buildx bake`` reads."""
        target = {
            "context": str(request.context),
            "dockerfile": str(request.dockerfile),
            "args": request.args,
            "tags": [request.tag],
            "platforms": [request.platform],
            "network": "none",  # older buildx plugins pass over it; the build uses no network either way
            "output": ["type=docker,rewrite-timestamp=true"],
        }
        return {"target": {"image": target}}

    def prepare(self, request: BuildRequest) -> None:
        path = self.bake_file(request)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.definition(request), indent=2) + "\n", encoding="utf-8")

    def build_command(self, request: BuildRequest) -> list[str]:
        return ["docker", "buildx", "bake", "--file", str(self.bake_file(request)), "image"]


class _Podman(_Docker):
    name, binary = "podman", "podman"

    def unusable(self) -> str:
        return Engine.unusable(self)

    def build_command(self, request: BuildRequest) -> list[str]:
        return ["podman", "build", *_buildah_flags(request)]

    def environment(self, request: BuildRequest) -> dict[str, str]:
        return {}

    def inspect(self, image: str) -> ImageInfo | None:
        found = super().inspect(image)
        if found is None:
            return None
        result = _run([self.binary, "image", "inspect", "--format", "{{.Digest}}", image])
        return ImageInfo(**{**found.__dict__, "digest": result.stdout.strip()})

    def export(self, image: str, target: Path, tag: str) -> None:
        _run(
            [
                self.binary,
                "push",
                "--quiet",
                "--format",
                "oci",
                image,
                f"oci-archive:{target}:{tag}",
            ]
        )


class _Buildah(Engine):
    name, binary = "buildah", "buildah"

    def build_command(self, request: BuildRequest) -> list[str]:
        return ["buildah", "bud", *_buildah_flags(request)]

    def inspect(self, image: str) -> ImageInfo | None:
        result = _run(["buildah", "inspect", "--type", "image", image], check=False)
        if result.returncode != 0:
            return None
        entry = json.loads(result.stdout)
        oci = entry["OCIv1"]
        # The docker view has what the OCI one lacks, and both have the rest.
        config = {**(entry["Docker"].get("config") or {}), **(oci.get("config") or {})}
        return _info(
            entry["FromImageID"], entry["FromImageDigest"], oci, config, oci["rootfs"]["diff_ids"]
        )

    def run_python(self, image: str, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        container = _run(
            ["buildah", "from", "--pull-never", "--network", "none", image]
        ).stdout.strip()
        try:
            return _run(
                ["buildah", "run", "--network", "none", container, "--", "python3", *arguments],
                check=False,
            )
        finally:
            _run(["buildah", "rm", container], check=False)

    def export(self, image: str, target: Path, tag: str) -> None:
        _run(
            ["buildah", "push", "--quiet", "--format", "oci", image, f"oci-archive:{target}:{tag}"]
        )


ENGINES: tuple[Engine, ...] = (_Buildx(), _Docker(), _Podman(), _Buildah())


def info_of(document: dict[str, Any], digest: str) -> ImageInfo:
    """The same from an image's configuration document, as a registry has it."""
    layers = (document.get("rootfs") or {}).get("diff_ids") or []
    return _info("", digest, document, document.get("config") or {}, layers)


def choose(wanted: str) -> Engine:
    """The engine called *wanted*, or with "auto" the first that works here.

    Raises:
        CommandError: it does not work, or none does; the message has each one's reason.
    """
    reasons = []
    for engine in ENGINES:
        if wanted not in ("auto", engine.name):
            continue
        reason = engine.unusable()
        if not reason:
            return engine
        reasons.append(f"{engine.name}: {reason}")
    raise CommandError(
        "no engine can build here. " + "; ".join(reasons),
        reason="no-engine",
        hint="install one (Debian, Ubuntu: apt-get install buildah runc netavark), or see the plan with --print",
    )


def run_build(engine: Engine, request: BuildRequest) -> None:
    """Build; the engine's own output goes to stderr.

    Raises:
        CommandError: the build failed.
    """
    engine.prepare(request)
    command = engine.build_command(request)
    environment = {**os.environ, **engine.environment(request)}
    result = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=2, check=False
    )
    if result.returncode != 0:
        raise CommandError(
            f"{command[0]} ended with {result.returncode}: the image was not built",
            code=ExitCode.FAILED,
            reason="build-failed",
            hint="the reason is in the output above",
        )


def _buildah_flags(request: BuildRequest) -> list[str]:
    flags = ["--format", "oci", "--network", "none", "--no-cache", "--platform", request.platform]
    flags += ["--timestamp", str(request.epoch)]
    if request.args["BASE_IMAGE"].startswith("localhost/"):
        flags.append("--pull-never")
    for name, value in request.args.items():
        flags += ["--build-arg", f"{name}={value}"]
    return [*flags, "-f", str(request.dockerfile), "-t", request.tag, str(request.context)]


def _info(
    image_id: str, digest: str, entry: dict[str, Any], config: dict[str, Any], layers: list[str]
) -> ImageInfo:
    return ImageInfo(
        id=image_id.removeprefix("sha256:"),
        digest=digest,
        architecture=str(entry.get("architecture") or entry.get("Architecture") or ""),
        user=config.get("User") or "",
        workdir=config.get("WorkingDir") or "",
        entrypoint=list(config.get("Entrypoint") or []),
        cmd=list(config.get("Cmd") or []),
        labels=dict(config.get("Labels") or {}),
        env=list(config.get("Env") or []),
        layers=list(layers),
    )


def _run(command: Sequence[str], check: bool = True) -> subprocess.CompletedProcess[str]:
    try:
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    except OSError as error:
        result = subprocess.CompletedProcess(command, 127, "", str(error))
    if check and result.returncode != 0:
        raise CommandError(
            f"{' '.join(command[:3])} ... ended with {result.returncode}: {_last_line(result.stderr)}",
            code=ExitCode.FAILED,
            reason="engine",
        )
    return result


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else "no message"
