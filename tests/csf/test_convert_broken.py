# SPDX-License-Identifier: Apache-2.0
"""``convert-csf --verify``, ``--restore`` and ``--info`` over damaged containers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from b12x_overlay.csf.core import container
from csf.convert_support import (
    edit_json,
    flip_last_byte,
    redo_hash,
    run,
    some_shard,
)


def test_verify_finds_changed_bytes(made: Path, capsys) -> None:
    shard = sorted((made / "tensors").iterdir())[0]
    flip_last_byte(shard)
    assert run("--verify", "--json", made) == 1
    faults = json.loads(capsys.readouterr().out)["faults"]
    assert faults == [f"{shard}: SHA-256 differs from manifest.json"]
    redo_hash(made, shard.name)
    assert run("--verify", made) == 1


def test_verify_finds_a_stream_that_decodes_to_other_scales(made: Path, capsys) -> None:
    for shard in sorted((made / "tensors").iterdir()):
        header = container.read_header(shard)
        fixed = [e for e in header.entries.values() if e.name.endswith(container.FIXED)]
        if fixed:
            break
    data = bytearray(shard.read_bytes())
    data[fixed[0].begin] ^= 1  # a base, so that a whole row moves by one
    shard.write_bytes(data)
    redo_hash(made, shard.name)
    assert run("--verify", "--json", made) == 1
    fault = json.loads(capsys.readouterr().out)["faults"][0]
    assert fixed[0].name.removesuffix(container.FIXED) in fault
    assert "decodes to other scales" in fault


BROKEN = [
    (lambda m: (m / "manifest.json").unlink(), "manifest.json: missing"),
    (lambda m: (m / "build-contract.json").unlink(), "build-contract.json: missing"),
    (lambda m: (m / "manifest.json").write_text("["), "not JSON"),
    (lambda m: edit_json(m / "manifest.json", lambda d: d.update(codec="x/9")), "codec is 'x/9'"),
    (lambda m: edit_json(m / "build-contract.json", lambda d: d.update(schema="x/2")), "schema is 'x/2'"),
    (lambda m: edit_json(m / "manifest.json", lambda d: d.update(family="other")), "they must agree"),
    (lambda m: edit_json(m / "manifest.json", lambda d: d["shards"].pop()), "is missing from manifest.json"),
    (
        lambda m: edit_json(m / "manifest.json", lambda d: d["shards"].append(d["shards"][0])),
        "is listed twice",
    ),
    (
        lambda m: edit_json(m / "manifest.json", lambda d: d["shards"][0].update(file="../a.safetensors")),
        "is not a plain *.safetensors file name",
    ),
    (lambda m: edit_json(m / "manifest.json", lambda d: d.update(shards=[])), "list of shard records"),
    (lambda m: edit_json(m / "manifest.json", lambda d: d["shards"][0].pop("file")), "bad shard record"),
    (lambda m: some_shard(m).write_bytes(some_shard(m).read_bytes()[:-1]), "manifest.json says"),
    (lambda m: some_shard(m).unlink(), "missing; manifest.json says"),
    (lambda m: (m / "metadata" / "config.json").unlink(), "config.json: listed in manifest.json but missing"),
    (lambda m: flip_last_byte(m / "metadata" / "config.json"), "config.json: SHA-256 differs"),
    (
        lambda m: edit_json(m / "build-contract.json", lambda d: d["source_names"].update(extra=some_shard(m).name)),
        "1 tensors are missing, the first is extra",
    ),
    (
        lambda m: edit_json(m / "build-contract.json", lambda d: d["source_names"].pop("lm_head.weight")),
        "holds lm_head.weight; build-contract.json does not name it",
    ),
    (lambda m: shutil.rmtree(m / "receipts"), "missing; without it the source shard cannot be rebuilt"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), BROKEN)
def test_broken_containers_are_named(made: Path, capsys, damage, message) -> None:
    damage(made)
    assert run("--verify", "--json", made) == 1
    faults = json.loads(capsys.readouterr().out)["faults"]
    assert any(message in fault for fault in faults), faults


def test_a_stream_that_does_not_decode_is_named_by_file_and_byte(
    made: Path, tmp_path: Path, capsys
) -> None:
    name = "model.layers.1.mlp.experts.1.down_proj.weight_scale"
    for shard in sorted((made / "tensors").iterdir()):
        entry = container.read_header(shard).entries.get(name + container.FIXED)
        if entry is not None:
            break
    data = bytearray(shard.read_bytes())
    data[entry.begin + 1] = 255
    shard.write_bytes(data)
    redo_hash(made, shard.name)
    wanted = f"{shard}: {name}: fixed stream, byte 1: byte {entry.begin + 1} of the file: base 255"
    assert run("--restore", made, tmp_path / "back") == 1
    assert wanted in capsys.readouterr().err
    assert run("--verify", "--json", made) == 1
    assert wanted in json.loads(capsys.readouterr().out)["faults"][0]


def test_restore_of_a_broken_container_publishes_nothing(
    made: Path, tmp_path: Path, capsys
) -> None:
    shard = some_shard(made)
    flip_last_byte(shard)
    redo_hash(made, shard.name)
    assert run("--restore", made, tmp_path / "back") == 1
    assert not (tmp_path / "back").exists()
    assert shard.name in capsys.readouterr().err


def test_info_names_what_is_wrong_with_a_container(made: Path, capsys) -> None:
    contract = json.loads((made / "build-contract.json").read_text())
    contract["source_names"].pop("lm_head.weight")
    (made / "build-contract.json").write_text(json.dumps(contract))
    assert run("--info", made) == 1
    assert "lm_head.weight; build-contract.json does not name it" in capsys.readouterr().err
