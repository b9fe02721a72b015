# SPDX-License-Identifier: Apache-2.0
"""docker/Dockerfile: clean for hadolint, and nothing in it that an old builder cannot read."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from b12x_overlay.image import content, engines, plan
from support.paths import REPO

TEXT = content.DOCKERFILE.read_text(encoding="utf-8")
CODE = "\n".join(line for line in TEXT.splitlines() if not line.startswith("#"))


def tool(name: str) -> str:
    path = Path(sys.executable).parent / name
    found = str(path) if path.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (its wheel exists for x86_64 only)")
    return found


def test_hadolint_has_nothing_to_say() -> None:
    result = subprocess.run(
        [tool("hadolint"), "--no-color", str(content.DOCKERFILE)], capture_output=True, text=True, check=False
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (0, "")


def test_every_exception_for_hadolint_is_known() -> None:
    # DL3006: the base's tag is in the build argument above the FROM line.
    assert re.findall(r"hadolint ignore=(\S+)", TEXT) == ["DL3006"]


def test_shellcheck_has_nothing_to_say() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=REPO, capture_output=True, text=True, check=False
    ).stdout.splitlines()  # fmt: skip
    if not listed:
        pytest.skip("not a git checkout: the shell scripts cannot be listed")
    shells = []
    for name in listed:
        path = REPO / name
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as stream:
                first = stream.readline(80)
            if name.endswith((".sh", ".bash")) or re.match(rb"#!.*\b(ba|da)?sh\b", first):
                shells.append(name)
    assert ".ci/run" in shells
    result = subprocess.run(
        [tool("shellcheck"), *shells], cwd=REPO, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (0, "")


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (r"^#\s*syntax\s*=", "needs the network"),
        (r"<<-?\s*[\"']?\w", "heredoc: buildah 1.28, engine 20.10"),
        (r"--link\b", "buildah"),
        (r"--parents\b|--exclude\b", "buildah 1.28"),
        (r"RUN\s+--network", "buildah 1.28"),
        (r"type=tmpfs,[^\s]*size=", "buildah"),
        (r"^(SHELL|HEALTHCHECK)\b", "dropped without a word by the OCI format"),
        (r"^(ENTRYPOINT|CMD|USER|WORKDIR)\b", "the base's stay"),
        (r"^COPY\s+--chmod", "gives sub-folders the mode of files"),
    ],
)
def test_nothing_that_an_old_builder_cannot_read(pattern: str, why: str) -> None:
    text = TEXT if "syntax" in pattern else CODE
    assert not re.search(pattern, text, re.MULTILINE), why


def test_every_argument_of_the_plan_is_declared_and_used() -> None:
    declared = set(re.findall(r"^ARG ([A-Z_]+)", CODE, re.MULTILINE))
    made = plan.make("localhost/none", "amd64", "", "x", "20260101", "", None)
    assert set(made.arguments()) | {"CACHE"} == declared
    for name in declared:
        assert len(re.findall(rf"\b{name}\b", CODE)) > 1, name


def test_the_context_leaves_out_what_is_not_needed() -> None:
    lines = (REPO / ".dockerignore").read_text(encoding="utf-8").split()
    assert "*" in lines
    assert {line[1:] for line in lines if line.startswith("!")} == {
        "changes", "docker", "overlay", "patches", "scripts",
    }  # fmt: skip


def test_cache_variables_are_those_that_their_programs_read() -> None:
    """The names, looked up where they are read; TileLang's is not, no package here brings it."""
    variables = set(re.findall(r"(\w+)=\$\{CACHE\}", CODE))
    assert len(variables) == 7
    import torch
    import triton.knobs
    from support.paths import SOURCES, site

    compiler = site("b12x-flashinfer") / "flashinfer/experimental/b12x/_lib/compiler.py"
    (wheel,) = SOURCES.glob("flashinfer_python-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        flashinfer = archive.read("flashinfer/jit/env.py").decode()
    read_by = {
        "VLLM_CACHE_ROOT": (site("stock") / "vllm/envs.py").read_text(encoding="utf-8"),
        "B12X_COMPILE_CACHE_DIR": compiler.read_text(encoding="utf-8"),
        "CUTE_DSL_CACHE_DIR": compiler.read_text(encoding="utf-8"),
        "TRITON_CACHE_DIR": inspect.getsource(triton.knobs),
        "QUACK_CACHE_DIR": (
            Path(torch.__file__).parent / "_vendor/quack/cache/__init__.py"
        ).read_text(encoding="utf-8"),
        "FLASHINFER_WORKSPACE_BASE": flashinfer,
    }
    for name, text in read_by.items():
        assert f'"{name}"' in text, name
    assert variables - set(read_by) == {"TILELANG_CACHE_DIR"}


@pytest.mark.parametrize("engine", engines.ENGINES, ids=lambda engine: engine.name)
def test_every_engine_gets_every_argument(engine: engines.Engine) -> None:
    request = plan.make("localhost/none", "arm64", "", "x", "20260101", "", None).request()
    command = engine.build_command(request)
    text = " ".join(command)
    if isinstance(engine, engines._Buildx):
        target = engine.definition(request)["target"]["image"]
        assert target["args"] == request.args
        assert (target["platforms"], target["tags"]) == (["linux/arm64"], [request.tag])
        return
    for name, value in request.args.items():
        assert f"{name}={value}" in command
    assert "linux/arm64" in command
    assert "--network none" in text
    assert command[-1] == str(REPO)
