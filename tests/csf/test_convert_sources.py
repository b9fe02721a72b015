# SPDX-License-Identifier: Apache-2.0
"""``convert-csf`` over sources and destinations that it must refuse."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from csf.convert_support import (
    edit_header,
    first,
    rewrite,
    run,
)
from safetensors.torch import load_file


@pytest.mark.parametrize("action", [None, "--info", "--verify", "--restore", "--serving-folder"])
@pytest.mark.parametrize("what", ["no such folder", "not a folder"])
def test_a_missing_source_is_a_usage_error(tmp_path: Path, capsys, action, what: str) -> None:
    gone = tmp_path / "gone"
    if what == "not a folder":
        gone.touch()
    target = [] if action in ("--info", "--verify") else [tmp_path / "out"]
    assert run(*([action] if action else []), gone, *target) == 2
    said = capsys.readouterr().err
    assert f"{gone}: {what}" in said
    assert "damaged" not in said and "fault" not in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("action", ["--verify", "--restore", "--serving-folder"])
def test_an_ordinary_checkpoint_is_no_damaged_container(
    source: Path, tmp_path: Path, capsys, action: str
) -> None:
    target = [] if action == "--verify" else [tmp_path / "out"]
    assert run(action, source, *target) == 2
    said = capsys.readouterr().err
    assert f"{source}: not a CSF container" in said and "damaged" not in said


def truncate(source: Path) -> None:
    data = first(source).read_bytes()
    first(source).write_bytes(data[:-7])


def drop_tensor(source: Path) -> None:
    edit_header(first(source), lambda t: t.pop(sorted(t)[0]))


def double_tensor(source: Path) -> None:
    other = load_file(source / "model-00002-of-00003.safetensors")
    name = sorted(other)[0]
    edit_header(first(source), lambda t: t.update({name: other[name]}))


def wrong_scale_shape(source: Path) -> None:
    def edit(tensors):
        name = next(n for n in tensors if n.endswith("experts.0.up_proj.weight_scale"))
        tensors[name] = tensors[name][:, :2].contiguous()

    for path in source.glob("*.safetensors"):
        if any(n.endswith("experts.0.up_proj.weight_scale") for n in load_file(path)):
            edit_header(path, edit)


def no_weight(source: Path) -> None:
    index = json.loads((source / "model.safetensors.index.json").read_text())
    name = next(n for n in index["weight_map"] if n.endswith("experts.1.down_proj.weight"))
    edit_header(source / index["weight_map"].pop(name), lambda t: t.pop(name))
    (source / "model.safetensors.index.json").write_text(json.dumps(index))


def leave_folder(source: Path) -> None:
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = "../elsewhere.safetensors"
    (source / "model.safetensors.index.json").write_text(json.dumps(index))


def one_plain_scale(source: Path) -> None:
    name = "model.layers.0.mlp.experts.1.up_proj.weight_scale"
    rewrite(source, lambda t: {n: v.view(torch.uint8) if n == name else v for n, v in t.items()})


def without(source: Path, ending: str) -> None:
    rewrite(source, lambda t: {n: v for n, v in t.items() if not n.endswith(ending)})


def half_a_character(source: Path) -> None:
    data = first(source).read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length].replace(
        b'{"__metadata__',
        b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"__metadata__',
    )
    first(source).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


REFUSED = [
    (
        one_plain_scale,
        "1 projections are not F8_E4M3 while others are, first model.layers.0.mlp.experts.1.up_proj",
    ),
    (
        lambda s: without(s, "0.mlp.experts.0.gate_proj.weight_scale"),
        "the scales of 1 projections are missing",
    ),
    (lambda s: without(s, "up_proj.weight_scale"), "the scales of 2 projections are missing"),
    (
        lambda s: without(s, "1.down_proj.weight_scale_2"),
        "has no model.layers.0.mlp.experts.1.down_proj.weight_scale_2",
    ),
    (half_a_character, "bad safetensors header: "),
    (lambda s: (s / "config.json").write_text("[" * 100_000), "config.json: not JSON"),
    (lambda s: (s / os.fsdecode(b"caf\xe9.txt")).touch(), "the file's name is not UTF-8"),
    (truncate, "00001-of-00003.safetensors: truncated: "),
    (drop_tensor, "is missing, model.safetensors.index.json places it there"),
    (double_tensor, "and again in"),
    (wrong_scale_shape, "its weight asks for [32, 4]"),
    (
        no_weight,
        "-of-00003.safetensors: model.layers.0.mlp.experts.1.down_proj.weight_scale: the checkpoint has no",
    ),
    (leave_folder, "is not a plain *.safetensors file name"),
    (lambda s: first(s).write_bytes(b"abc"), "truncated or not safetensors: 3 bytes"),
    (lambda s: first(s).unlink(), "00001-of-00003.safetensors: missing"),
    (lambda s: (s / "config.json").unlink(), "config.json: missing"),
    (lambda s: (s / "config.json").write_text("{"), "config.json: not JSON"),
    (lambda s: (s / "config.json").write_text("{}"), "no num_hidden_layers"),
    (
        lambda s: (s / "config.json").write_text('{"num_hidden_layers": 0}'),
        "no NVFP4 expert scales below layer 0",
    ),
]


@pytest.mark.parametrize(("damage", "message"), REFUSED)
def test_bad_sources_are_refused_and_nothing_is_written(
    source, tmp_path, capsys, damage, message
) -> None:
    damage(source)
    assert run(source, tmp_path / "csf") == 3
    assert message in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("inside", ["csf", "linked/csf"])
def test_a_destination_in_the_source_is_refused(source, tmp_path, capsys, inside) -> None:
    (source / "sub").mkdir()
    (source / "linked").symlink_to("sub")
    before = sorted(source.rglob("*"))
    assert run(source, source / inside) == 3
    assert "lies inside the source" in capsys.readouterr().err
    assert sorted(source.rglob("*")) == before


def test_a_dangling_link_is_an_existing_destination(source: Path, tmp_path: Path) -> None:
    (tmp_path / "csf").symlink_to("nowhere")
    assert run(source, tmp_path / "csf") == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["csf", "source"]


def test_existing_destinations_and_containers_as_source_are_refused(
    source, made, tmp_path, capsys
) -> None:
    assert run(source, made) == 3
    assert f"{made} exists" in capsys.readouterr().err
    assert run(made, tmp_path / "again") == 3
    assert "is a CSF container already" in capsys.readouterr().err
    assert run(source, tmp_path / "no" / "such" / "folder") == 3
    assert "mkdir -p" in capsys.readouterr().err


def test_usage_errors(source: Path, made: Path) -> None:
    for arguments in (
        [source],
        ["--verify", made, "x"],
        ["--restore", made],
        ["--restore", "--verify", made],
    ):
        with pytest.raises(SystemExit) as caught:
            run(*arguments)
        assert caught.value.code == 2
