# SPDX-License-Identifier: Apache-2.0
"""scripts/convert-csf on small checkpoints: round trip, resume, verification, and what it refuses."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from b12x_overlay.csf import cli, convert
from b12x_overlay.csf.core import codec, container, readable, shards
from b12x_overlay.paths import REPO
from csf import checkpoints
from csf.convert_support import (
    COMPRESSED,
    MAIN,
    add_tensor,
    edit_header,
    files_of,
    interrupt_then_change,
    run,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file


def test_round_trip_is_bit_for_bit(source: Path, made: Path, tmp_path: Path) -> None:
    before = files_of(source)
    assert run("--verify", made) == 0
    assert run("--restore", made, tmp_path / "back") == 0
    assert files_of(tmp_path / "back") == before
    assert files_of(source) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "csf", "source"]


def test_container_holds_what_the_format_page_says(source: Path, made: Path) -> None:
    manifest = json.loads((made / "manifest.json").read_text())
    contract = json.loads((made / "build-contract.json").read_text())
    assert manifest["schema"] == contract["schema"] == "lil-nvfp4-csf-checkpoint/1"
    assert manifest["codec"] == contract["codec"] == "byte-window4-fixed-stream-u24-exceptions/1"
    assert manifest["family"] == contract["family"] == "qwen3_moe_nvfp4"
    index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    assert contract["source_names"] == index
    assert not (made / "model.safetensors.index.json").exists()
    assert set(manifest["metadata_sha256"]) == {
        "config.json", "tokenizer.json", "model.safetensors.index.json",
    }  # fmt: skip
    seen = 0
    for record in manifest["shards"]:
        receipt = json.loads((made / "receipts" / f"{record['file']}.json").read_text())
        assert {key: receipt[key] for key in record} == record
        original = load_file(source / record["file"])
        with safe_open(made / "tensors" / record["file"], "pt") as shard:
            assert shard.metadata() == {
                "format": "pt", "schema": manifest["schema"], "codec": manifest["codec"],
            }  # fmt: skip
            names = set(shard.keys())
            for name, tensor in original.items():
                if name in names:
                    assert checkpoints.as_bytes(shard.get_tensor(name)) == checkpoints.as_bytes(
                        tensor
                    )
                    continue
                seen += 1
                assert name.endswith(".weight_scale") and ".layers.2." not in name
                fixed = shard.get_tensor(name + ".nvfp4_csf_fixed")
                words = shard.get_tensor(name + ".nvfp4_csf_exceptions")
                assert (fixed.dtype, words.dtype) == (torch.uint8, torch.uint32)
                decoded = codec.decode(codec.CsfStreams(*tensor.shape, fixed, words))
                assert checkpoints.as_bytes(decoded) == checkpoints.as_bytes(tensor)
    assert seen == COMPRESSED


def test_data_is_aligned_to_its_type(source: Path, tmp_path: Path) -> None:
    add_tensor(source, "a.first", torch.zeros(3, dtype=torch.float8_e4m3fn))
    add_tensor(source, "counter", torch.zeros(1, dtype=torch.int64))
    assert run(source, tmp_path / "csf") == 0
    for path in (tmp_path / "csf" / "tensors").iterdir():
        for entry in container.read_header(path).entries.values():
            assert entry.begin % shards.ITEM_BYTES[entry.dtype] == 0


def test_single_file_checkpoints(tmp_path: Path) -> None:
    root = tmp_path / "source"
    checkpoints.small(root, shards=1)
    (root / "model.safetensors.index.json").unlink()
    (root / "model-00001-of-00001.safetensors").rename(root / "model.safetensors")
    assert run(root, tmp_path / "csf") == 0
    assert run("--restore", tmp_path / "csf", tmp_path / "back") == 0
    assert files_of(tmp_path / "back") == files_of(root)


def test_links_are_followed(source: Path, tmp_path: Path) -> None:
    """A Hugging Face cache holds links to blobs."""
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for path in source.iterdir():
        (linked / path.name).symlink_to(path)
    assert run(linked, tmp_path / "csf") == 0
    assert run("--restore", tmp_path / "csf", tmp_path / "back") == 0
    assert files_of(tmp_path / "back") == files_of(source)
    assert not any(path.is_symlink() for path in (tmp_path / "back").iterdir())


def test_printed_commands_can_be_pasted(source: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """Where a path holds a space and what a shell would expand."""
    place = tmp_path / "my $models; x"
    place.mkdir()

    interrupt_then_change(monkeypatch, source, place / "csf")
    run(source, place / "csf")
    hint = capsys.readouterr().err.rpartition("after ")[2]
    assert shlex.split(hint) == ["rm", "-r", str(place / ".csf.partial")]
    run(source, place / "no such" / "csf")
    hint = capsys.readouterr().err.rpartition("next: ")[2]
    assert shlex.split(hint) == ["mkdir", "-p", str(place / "no such")]
    shutil.rmtree(place / ".csf.partial")

    def change(*arguments):
        os.utime(source / "config.json", (2, 2))
        return real(*arguments)

    real = convert._convert_shard
    monkeypatch.setattr(convert, "_convert_shard", change)
    assert run(source, place / "csf") == 3
    said = capsys.readouterr().err
    assert "files changed while they were read" in said
    assert shlex.split(said.rpartition("after ")[2]) == ["rm", "-r", str(place / ".csf.partial")]
    monkeypatch.undo()
    shutil.rmtree(place / ".csf.partial")
    assert run(source, place / "csf") == 0
    assert cli.main(["--serving-folder", str(place / "csf"), str(place / "serve")]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[:4] == ["VLLM_B12X_MOE_FP4_FORCE_A16=1", "vllm", "serve", str(place / "serve")]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "1.000 KB"), (999_999_999, "1.000 GB"), (12_345_678, "12.346 MB"),
        (9_500_000_000, "9.500 GB"), (-40_000, "-40.000 KB"),
    ],
)  # fmt: skip
def test_sizes_have_the_unit_that_fits(nbytes: int, text: str) -> None:
    assert readable(nbytes) == text


def test_small_models_have_sizes(source: Path, tmp_path: Path, capsys) -> None:
    assert cli.main([str(source), str(tmp_path / "csf")]) == 0
    shown = capsys.readouterr()
    assert f"12 scale tensors, {readable(2 * 2 * 3 * 128)} -> " in shown.out
    assert "0.000" not in shown.out + shown.err


def test_what_stays_behind_is_said(source: Path, tmp_path: Path, capsys) -> None:
    (source / "figures").mkdir()
    (source / "gone.md").symlink_to("nowhere")
    assert cli.main([str(source), str(tmp_path / "csf")]) == 0
    assert "not carried along" in (said := capsys.readouterr().err)
    assert "figures, gone.md" in said


def test_mtp_modules_with_their_own_numbering_stay_plain(tmp_path: Path) -> None:
    """Qwen's MTP module counts from layer 0 again."""
    root = tmp_path / "source"
    checkpoints.small(root, shards=1)
    path = next(root.glob("*.safetensors"))
    tensors = load_file(path)
    moved = {n: n.replace("model.layers.2.", "mtp.layers.0.") for n in tensors}
    save_file({moved[n]: t for n, t in tensors.items()}, path, {"format": "pt"})
    index = {"weight_map": dict.fromkeys(moved.values(), path.name)}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    assert run(root, tmp_path / "csf") == 0
    stored = load_file(tmp_path / "csf" / "tensors" / path.name)
    assert "mtp.layers.0.mlp.experts.1.up_proj.weight_scale" in stored
    assert "model.layers.0.mlp.experts.1.up_proj.weight_scale" not in stored


def test_info_counts_every_byte(source: Path, made: Path, capsys) -> None:
    assert run("--info", "--json", made) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["kind"] == "container"
    plain = {"gate": 32 * 4, "up": 32 * 4, "down": 64 * 2}
    layer = next(x for x in document["layers"] if x["layer"] == "model.layers.1")
    assert layer["scales"] == 2 * sum(plain.values())
    assert layer["fixed"] == 2 * sum(codec.fixed_bytes(*s) for s in ((32, 4), (32, 4), (64, 2)))
    mtp = next(x for x in document["layers"] if x["layer"] == "model.layers.2")
    assert (mtp["plain_scales"], mtp["scales"]) == (2 * sum(plain.values()), 0)
    stored = sum(
        entry.nbytes
        for path in (made / "tensors").iterdir()
        for entry in container.read_header(path).entries.values()
    )
    total = document["total"]
    assert total["other"] + total["plain_scales"] + total["fixed"] + total["exceptions"] == stored
    assert run("--info", "--json", source) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "ordinary checkpoint"


def test_a_reader_that_goes_changes_neither_work_nor_exit_code(
    source: Path, made: Path, tmp_path: Path
) -> None:
    def without_reader(*arguments: object) -> int:
        command = [sys.executable, "-c", MAIN, *map(str, arguments)]
        reader, writer = os.pipe()
        os.close(reader)
        environment = {**os.environ, "PYTHONPATH": str(REPO / "scripts")}
        done = subprocess.run(command, stdout=writer, stderr=writer, env=environment, check=False)
        os.close(writer)
        return done.returncode

    assert without_reader(source, tmp_path / "again") == 0
    assert (tmp_path / "again" / "manifest.json").exists()
    next((made / "receipts").iterdir()).unlink()
    assert without_reader("--verify", made) == 1
    assert without_reader("--json", "--verify", made) == 1


def test_names_that_the_terminal_cannot_show_are_escaped(source: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MAIN, str(source), str(tmp_path / "dépôt")],
        env={**os.environ, "PYTHONPATH": str(REPO / "scripts"), "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"d\\xe9p\\xf4t: 12 scale tensors" in done.stdout


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """Copying a 256 MiB tensor must not take 256 MiB: the largest anonymous memory seen while converting."""
    root = tmp_path / "source"
    checkpoints.small(root, shards=1)
    add_tensor(root, "filler", torch.zeros(256 << 20, dtype=torch.uint8))
    script = """
import re, sys, threading
from b12x_overlay.csf import cli
def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
seen, done = [anonymous()], threading.Event()
def watch():
    while not done.wait(0.002):
        seen.append(anonymous())
thread = threading.Thread(target=watch)
thread.start()
code = cli.main(["--quiet", *sys.argv[1:]])
done.set()
thread.join()
print(code, max(seen) - seen[0], len(seen))
"""
    environment = {**os.environ, "PYTHONPATH": str(REPO / "scripts")}
    command = [sys.executable, "-c", script, str(root), str(tmp_path / "csf")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    code, grown, samples = result.stdout.split()
    assert code == "0"
    assert int(samples) > 10
    assert float(grown) < 64, f"{grown} MiB"


def test_scales_of_any_bytes_survive(tmp_path: Path) -> None:
    """Not only plausible ones: every byte value, NaN and negative codes included."""
    root = tmp_path / "source"
    checkpoints.small(root, shards=1)
    path = next(root.glob("*.safetensors"))

    def scatter(tensors):
        rng = np.random.default_rng(1)
        for name, tensor in tensors.items():
            if tensor.dtype == torch.float8_e4m3fn:
                noise = torch.from_numpy(rng.integers(0, 256, tensor.shape, dtype=np.uint8))
                tensors[name] = noise.view(torch.float8_e4m3fn)

    edit_header(path, scatter)
    assert run(root, tmp_path / "csf") == 0
    assert run("--restore", tmp_path / "csf", tmp_path / "back") == 0
    assert files_of(tmp_path / "back") == files_of(root)
