# SPDX-License-Identifier: Apache-2.0
"""scripts/build-image: base lookup against a real HTTP registry, content id, tag, errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from b12x_overlay.console import CommandError
from b12x_overlay.image import content, engines, plan, receipt, reference
from b12x_overlay.image.content import Base
from support.paths import SCRIPTS

from image.registry_server import Store, serve


def build_image(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPTS / "build-image", *arguments],
        env={**os.environ, **environ}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def make(base: str, arch: str = "amd64", **given: Any) -> plan.Plan:
    values = {"line": "", "name": "x", "date": "20260101", "url": "", "engine": None, **given}
    return plan.make(base, arch, **values)


@pytest.fixture
def store() -> Store:
    made = Store()
    amd = made.image("amd64", {"ai.vllm.build.commit": "4ba787ec9abc"})
    arm = made.image("arm64", {"ai.vllm.build.commit": "4ba787ec9abc"})
    made.tags["v0.33.0"] = made.index(amd64=amd, arm64=arm)
    made.tags["single"] = amd
    made.tags["other"] = made.image("amd64", {"ai.vllm.build.commit": "0123456789"})
    made.tags["amd-only"] = made.index(amd64=amd)
    return made


def test_both_digests_of_a_multi_platform_base_are_recorded(store: Store) -> None:
    with serve(store) as host:
        amd, arm = (make(f"{host}/vllm/vllm-openai:v0.33.0", arch) for arch in ("amd64", "arm64"))
    assert amd.base.index_digest == arm.base.index_digest == store.tags["v0.33.0"]
    assert amd.base.digest == store.tags["single"]
    assert amd.base.digest != arm.base.digest
    assert amd.base_image == f"{host}/vllm/vllm-openai@{amd.base.digest}"  # FROM is pinned
    assert amd.base.name == f"{host}/vllm/vllm-openai:v0.33.0"
    assert amd.base_info is not None
    assert (amd.base_info.architecture, amd.base_info.digest) == ("amd64", amd.base.digest)
    assert amd.content_id != arm.content_id
    assert arm.tag.startswith("v0.33.0-b12x-arm64-20260101-")
    assert "never run" in arm.arguments()["STATUS"]


def test_a_digest_can_be_given_for_the_index_or_for_the_platform(store: Store) -> None:
    with serve(store) as host:
        name = f"{host}/vllm/vllm-openai"
        for digest in (store.tags["v0.33.0"], store.tags["single"]):
            assert make(f"{name}@{digest}").base.digest == store.tags["single"]


def test_a_base_of_another_architecture_is_refused(store: Store) -> None:
    with serve(store) as host:
        for tag, arch in (("single", "arm64"), ("amd-only", "arm64")):
            with pytest.raises(CommandError, match="amd64") as error:
                make(f"{host}/v/v:{tag}", arch)
            assert error.value.reason == "architecture"


def test_a_base_of_another_commit_is_named(store: Store) -> None:
    with serve(store) as host:
        assert any("0123456789" in note for note in make(f"{host}/v/v:other").notes)
        assert not any(
            "commit" in note and "4ba" in note for note in make(f"{host}/v/v:single").notes
        )


def test_a_damaged_answer_is_not_believed(store: Store) -> None:
    digest = store.tags["single"]
    kind, data = store.objects[digest]
    store.objects[digest] = (kind, data + b" ")
    with serve(store) as host:
        made = make(f"{host}/v/v:v0.33.0")
    assert not made.resolved
    assert any(digest in note for note in made.notes)


class Pulled(engines._Buildah):
    """An engine that has every image, pulled long ago."""

    architecture, digest = "amd64", "sha256:" + "5" * 64

    def inspect(self, image: str) -> engines.ImageInfo | None:
        return engines.ImageInfo("id", self.digest, self.architecture, "", "", [], [], {}, [], [])


def test_off_line_the_engine_is_asked() -> None:
    name = "localhost:1/v/v:1"  # nothing listens there
    made = make(name, engine=Pulled())
    assert (made.base.digest, made.base.index_digest) == (Pulled.digest, "")
    assert made.base_image == f"localhost:1/v/v@{Pulled.digest}"
    assert any("cannot be reached" in note for note in made.notes)
    with pytest.raises(CommandError, match="amd64"):
        make(name, "arm64", engine=Pulled())
    given = "sha256:" + "6" * 64
    assert make(f"{name}@{given}").base.digest == given  # no engine: as given


def test_what_is_not_there_is_said(store: Store) -> None:
    with serve(store) as host:
        missing = make(f"{host}/v/v:nowhere")
    assert not missing.resolved
    assert any("404" in note for note in missing.notes)
    unreachable = make(f"{host}/v/v:v0.33.0")  # the server is gone
    assert any("cannot be reached" in note for note in unreachable.notes)


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("vllm/vllm-openai:v0.33.0", "docker.io/vllm/vllm-openai:v0.33.0"),
        ("ubuntu", "docker.io/library/ubuntu:latest"),
        ("ghcr.io/a/b:c", "ghcr.io/a/b:c"),
        ("localhost:5000/a", "localhost:5000/a:latest"),
        ("localhost/a:b", "localhost/a:b"),
    ],
)
def test_image_names(text: str, full: str) -> None:
    assert reference.parse(text).full == full
    digest = "sha256:" + "a" * 64
    assert reference.parse(f"{text}@{digest}").digest == digest


@pytest.mark.parametrize(
    "text", ["", "A/b", "a b", "a:", "a@sha256:12", "a@sha1:" + "a" * 64, "a:b:c", "https://a/b"]
)
def test_no_image_names(text: str) -> None:
    if text == "a:":
        assert reference.parse(text).tag == "latest"
        return
    with pytest.raises(reference.ReferenceError):
        reference.parse(text)


def test_the_same_inputs_give_the_same_id_and_every_input_counts() -> None:
    base = Base("docker.io/vllm/vllm-openai:v0.33.0", "sha256:" + "1" * 64, "sha256:" + "2" * 64)
    one = content.inputs(base, "x86_64")
    assert content.content_id(one) == content.content_id(content.inputs(base, "x86_64"))
    others = [
        content.inputs(Base(base.name, "sha256:" + "3" * 64, base.index_digest), "x86_64"),
        content.inputs(Base(base.name, base.digest, ""), "x86_64"),
        content.inputs(Base("other", base.digest, base.index_digest), "x86_64"),
        content.inputs(base, "aarch64"),
        {**one, "dockerfile": "0" * 64},
        {**one, "programs": {**one["programs"], "verify": "0" * 64}},
        {**one, "patchset": {**one["patchset"], "patchset": "0" * 16}},
        {**one, "fragments": []},
    ]
    ids = {content.content_id(inputs) for inputs in (one, *others)}
    assert len(ids) == len(others) + 1


def test_the_tag_has_line_date_and_id() -> None:
    made = make("localhost/none:1", line="karmic", date="20261129")
    assert re.fullmatch(r"karmic-20261129-[0-9a-f]{16}", made.tag)
    assert made.tag.endswith(made.content_id[:16])


def test_print_builds_nothing_and_needs_no_engine(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    result = build_image("--base", "localhost/none:1", "--print", "--json", PATH=str(tools))
    document = json.loads(result.stdout)
    assert (result.returncode, document["engine"], document["command"]) == (1, None, None)
    assert document["base"]["resolved"] is False
    assert "is not an image that any engine has" in result.stderr


def test_without_an_engine_each_ones_reason_is_given(tmp_path: Path) -> None:
    result = build_image("--base", "localhost/none:1", PATH=str(tmp_path))
    assert result.returncode == 3
    for name in ("buildx", "docker", "podman", "buildah"):
        assert f"{name}: " in result.stderr
    assert "apt-get install buildah" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--base", "Not A Name"), 2),
        (("--line", "has space"), 2),
        (("--date", "yesterday"), 2),
        (("--date", "20261399"), 2),
        (("--name", "UPPER"), 2),
        (("--name", "x:latest"), 2),  # a second tag would be appended
        (("--name", "x@sha256:" + "0" * 64), 2),
        (("--programs", "/nonexistent"), 2),  # with --print, which writes nothing
        (("--arch", "riscv64"), 2),
        (("--engine", "kaniko"), 2),
        (("--pri",), 2),  # no abbreviations
    ],
)
def test_usage_errors(arguments: tuple[str, ...], code: int) -> None:
    base = () if "--base" in arguments else ("--base", "localhost/none:1")
    result = build_image("--print", *base, *arguments)
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr


def test_output_that_is_in_the_way(tmp_path: Path) -> None:
    made = make("localhost/none:1")
    with pytest.raises(CommandError, match="is no folder"):
        receipt.refuse_existing(made, Path(__file__))
    receipt.refuse_existing(made, tmp_path / "new")
    (tmp_path / "new" / f"x-{made.tag}.oci.tar").touch()
    with pytest.raises(CommandError, match="exists"):
        receipt.refuse_existing(made, tmp_path / "new")
    receipt.refuse_existing(make("localhost/none:1", date="20260102"), tmp_path / "new")


@pytest.mark.parametrize("epoch", ["today", "9" * 14, "-1", "²"])
def test_a_bad_epoch_is_refused(epoch: str) -> None:
    result = build_image("--print", "--base", "localhost/none:1", SOURCE_DATE_EPOCH=epoch)
    assert result.returncode == 2
    assert "error: SOURCE_DATE_EPOCH" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_registry_with_a_port_is_no_tag() -> None:
    assert make("localhost/none:1", name="localhost:5000/a/b").image.startswith(
        "localhost:5000/a/b:v0"
    )


class TestPrograms:
    """--programs DIR."""

    def test_they_replace_earlier_ones_and_nothing_else(self, tmp_path: Path) -> None:
        assert build_image("--programs", str(tmp_path)).returncode == 0
        assert build_image("--programs", str(tmp_path)).returncode == 0
        (tmp_path / "doctor").write_text("#!/bin/sh\n")
        verify = (tmp_path / "verify").stat().st_ino
        result = build_image("--programs", str(tmp_path))
        assert result.returncode == 3
        assert f"{tmp_path / 'doctor'} is in the way" in result.stderr
        assert "next: " in result.stderr
        assert (tmp_path / "doctor").read_text() == "#!/bin/sh\n"
        assert (tmp_path / "verify").stat().st_ino == verify

    def test_a_file_in_the_folders_place(self, tmp_path: Path) -> None:
        (tmp_path / "x").touch()
        for place in ("x", "x/y"):
            result = build_image("--programs", str(tmp_path / place))
            assert (result.returncode, "is in the way" in result.stderr) == (3, True)

    def test_a_full_disk_leaves_no_part(self, tmp_path: Path) -> None:
        line = f'trap "" XFSZ; ulimit -f 16; exec "$0" "$1" --programs "{tmp_path}"'
        done = subprocess.run(
            ["bash", "-c", line, sys.executable, str(SCRIPTS / "build-image")],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 4
        assert f"error: {tmp_path / 'verify'} cannot be written: File too large" in done.stderr
        assert list(tmp_path.iterdir()) == []


def test_credentials_of_a_remote_do_not_reach_the_labels() -> None:
    assert plan._public("https://user:secret@host.org/a/b.git") == "https://host.org/a/b"
    assert plan._public("git@host.org:a/b.git") == "https://host.org/a/b"
    assert plan._public("ssh://git@host.org/a/b") == "https://host.org/a/b"
    for private in ("/srv/git/a.git", "file:///srv/a", "../a", ""):
        assert plan._public(private) == ""
