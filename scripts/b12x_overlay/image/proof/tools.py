# SPDX-License-Identifier: Apache-2.0
"""buildah in a folder of its own, and the stand-in base."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from b12x_overlay import bootstrap
from b12x_overlay.console import CommandError
from b12x_overlay.exitcodes import ExitCode
from b12x_overlay.paths import REPO
from b12x_overlay.testenv import wheels

PACKAGES = ("buildah", "runc", "netavark", "mmdebstrap")
_PROGRAMS = ("buildah", "runc", "mmdebstrap")
_SOURCES = ("/etc/apt/sources.list.d/debian.sources", "/etc/apt/sources.list")
STANDIN = "localhost/vllm-standin:v0.33.0"
# With Python, a shell and the tools that an image needs to start; nothing of it is configured.
_ROOT = "python3-minimal,libpython3-stdlib,bash,dash,coreutils,sed,grep,base-files,libc-bin"

_STANDIN_FILE = """\
FROM scratch
ADD rootfs.tar /
RUN --mount=type=bind,from=wheels,target=/mnt rm -f /usr/lib/python3*/EXTERNALLY-MANAGED \\
 && /mnt/uv pip install --system --offline --no-cache --no-deps /mnt/vllm-*.whl
LABEL org.opencontainers.image.source="https://github.com/vllm-project/vllm" \\
      org.opencontainers.image.url="https://github.com/vllm-project/vllm" \\
      org.opencontainers.image.version="v0.33.0" \\
      ai.vllm.build.commit="4ba787ec9"
ENV VLLM_USAGE_SOURCE=production-docker-image
WORKDIR /vllm-workspace
ENTRYPOINT ["vllm", "serve"]
"""


def missing() -> list[str]:
    """The programs that are not installed."""
    return [name for name in _PROGRAMS if shutil.which(name) is None]


def impossible() -> str:
    """Why the proof cannot run on this machine even after an installation, "" if it can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "it needs root on Linux (buildah with an overlay store, mmdebstrap)"
    if missing() and shutil.which("apt-get") is None:
        return f"{', '.join(missing())} are not installed and there is no apt-get"
    if not any(Path(path).exists() for path in _SOURCES):
        return "no Debian package sources (/etc/apt) from which to make a base"
    return ""


def install() -> None:
    """apt-get install what is missing."""
    if not missing():
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    wait = ["-o", "DPkg::Lock::Timeout=300"]
    run(["apt-get", *wait, "update", "-qq"], env=environment)
    run(
        ["apt-get", *wait, "install", "-y", "-qq", "--no-install-recommends", *PACKAGES],
        env=environment,
    )


class Workshop:
    """A folder with its own container store, so that nothing of the machine's images is touched."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("store", "run", "tmp", "wheels", "context"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        storage = f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/store"\nrunroot = "{folder}/run"\n'
        (folder / "storage.conf").write_text(storage)
        # Limits: a container of Debian 13's buildah may not raise its own. runc: crun refuses cgroups v1.
        limits = '[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]\n[engine]\nruntime = "runc"\n'
        (folder / "containers.conf").write_text(limits)
        self.environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("VLLM_", "B12X_W4A16"))
            },
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "BUILDAH_ISOLATION": "oci",
            "TMPDIR": str(folder / "tmp"),
        }

    def buildah(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run buildah on the store."""
        return run(["buildah", *arguments], env=self.environment, check=check)

    def build_image(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run scripts/build-image on the store."""
        command = [
            sys.executable,
            str(REPO / "scripts" / "build-image"),
            "--engine",
            "buildah",
            *arguments,
        ]
        return run(command, env=self.environment, check=check)

    def make_standin(self) -> None:
        """Make :data:`STANDIN`."""
        sources = next(path for path in _SOURCES if Path(path).exists())
        root = self.folder / "context" / "rootfs.tar"
        if not root.exists():
            command = [
                "mmdebstrap",
                "--quiet",
                "--mode=root",
                "--variant=extract",
                f"--include={_ROOT}",
            ]
            partial = root.with_name("partial.tar")
            run([*command, "", str(partial), sources], env=self.environment)
            partial.replace(root)
        uv = bootstrap.ensure("proof").parent / "uv"
        _link(uv, self.folder / "wheels" / "uv")
        for wheel in (wheels.vllm_wheel(), *map(wheels.provider_wheel, wheels.PROVIDERS)):
            path = wheels.fetch(wheel)
            _link(path, self.folder / "wheels" / path.name)
        file = self.folder / "Dockerfile.standin"
        file.write_text(_STANDIN_FILE)
        self.buildah(
            "bud", "--format", "docker", "--network", "none", "--pull-never", "--no-cache", "--build-context",
            f"wheels={self.folder}/wheels", "-f", str(file), "-t", STANDIN, str(self.folder / "context"),
        )  # fmt: skip

    def derive(
        self, base: str, name: str, script: str, arch: str = "", wheels_mounted: bool = False
    ) -> str:
        """An image *name* made from *base* by a shell *script*; *arch* relabels it."""
        container = self.start(base)
        mounts = ["-v", f"{self.folder}/wheels:/mnt:ro"] if wheels_mounted else []
        if script:
            self.buildah("run", "--network", "none", *mounts, container, "--", "sh", "-euc", script)
        if arch:
            self.buildah("config", "--arch", arch, container)
        image = f"localhost/{name}:test"
        self.buildah("commit", "--quiet", "--rm", container, image)
        return image

    def start(self, image: str) -> str:
        """A container of *image*; its name."""
        return self.buildah("from", "--pull-never", "--network", "none", image).stdout.strip()

    def execute(self, container: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a container without network."""
        return self.buildah("run", "--network", "none", container, "--", *command, check=False)


def run(
    command: Sequence[str], env: dict[str, str] | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a command, with its output in the error if it fails."""
    result = subprocess.run(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if check and result.returncode != 0:
        output = f"{result.stdout}\n{result.stderr}".strip()[-3000:]
        text = f"{' '.join(command)} ended with {result.returncode}\n{output}"
        raise CommandError(text, code=ExitCode.FAILED, reason="tool")
    return result


def _link(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:  # another file system
        shutil.copy2(source, target)
