# SPDX-License-Identifier: Apache-2.0
"""scripts/convert-csf on small checkpoints: round trip, resume, verification, and what it refuses."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from b12x_overlay.csf import cli, convert, files, restore, workfolder
from b12x_overlay.csf.core import codec, container, readable, shards
from b12x_overlay.paths import REPO
from csf import checkpoints
from safetensors import safe_open
from safetensors.torch import load_file, save_file

MAIN = "import sys; from b12x_overlay.csf import cli; sys.exit(cli.main(sys.argv[1:]))"
COMPRESSED = 2 * 2 * 3  # layers, experts, projections


def run(*arguments: object) -> int:
    return cli.main(["--quiet", *map(str, arguments)])


def files_of(root: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    checkpoints.small(tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def made(source: Path, tmp_path: Path) -> Path:
    assert run(source, tmp_path / "csf") == 0
    return tmp_path / "csf"


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


def add_tensor(root: Path, name: str, tensor: torch.Tensor) -> None:
    path = sorted(root.glob("*.safetensors"))[0]
    edit_header(path, lambda tensors: tensors.update({name: tensor}))
    index = json.loads((root / "model.safetensors.index.json").read_text())
    index["weight_map"][name] = path.name
    (root / "model.safetensors.index.json").write_text(json.dumps(index))


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


@pytest.mark.parametrize("after", [0, 1, 2])
def test_an_interrupted_run_is_continued(
    source: Path, tmp_path: Path, monkeypatch, after: int
) -> None:
    real, calls = convert._convert_shard, []

    def stop_after(work, header, compressed):
        if len(calls) == after:
            raise KeyboardInterrupt
        calls.append(header.path.name)
        return real(work, header, compressed)

    monkeypatch.setattr(convert, "_convert_shard", stop_after)
    assert run(source, tmp_path / "csf") == 130
    assert not (tmp_path / "csf").exists()
    monkeypatch.setattr(
        convert, "_convert_shard", lambda *a: calls.append(a[1].path.name) or real(*a)
    )
    assert run(source, tmp_path / "csf") == 0
    assert calls == sorted(set(calls)) and len(calls) == 3
    assert run("--verify", tmp_path / "csf") == 0


def test_a_killed_run_is_continued(source: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle of the second shard: no handler runs, its temporary file stays behind."""
    script = """
import os, signal, sys
from b12x_overlay.csf import cli, convert, files
real = convert.HashingWriter.write
def write(self, data):
    real(self, data)
    if "00002" in self._file.name and self.nbytes > 3000:
        self._file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
files.HashingWriter.write = write
cli.main(sys.argv[1:])
"""
    command = [sys.executable, "-c", script, str(source), str(tmp_path / "csf")]
    environment = {**os.environ, "PYTHONPATH": str(REPO / "scripts")}
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    work = tmp_path / ".csf.partial" / "payload"
    assert [p.name for p in (work / "receipts").iterdir()] == [
        "model-00001-of-00003.safetensors.json"
    ]
    assert list((work / "tensors").glob(".*.tmp"))
    assert not (tmp_path / "csf").exists()
    assert run(source, tmp_path / "csf") == 0
    assert run("--verify", tmp_path / "csf") == 0
    assert not work.parent.exists()
    assert not [name for name in files_of(tmp_path / "csf") if name.endswith(".tmp")]


BOOKKEEPING = ("job.json", "payload", "manifest.json.tmp", "lock")


@pytest.fixture
def named_like_bookkeeping(source: Path) -> Path:
    """A source whose own files have the names that the commands use beside their results."""
    for name in BOOKKEEPING:
        (source / name).write_text(f'{{"user": "{name}"}}')
    return source


@pytest.mark.parametrize("stopped_at", [None, 0, 1])
def test_files_named_like_the_bookkeeping_come_back(
    named_like_bookkeeping: Path, tmp_path: Path, monkeypatch, stopped_at: int | None
) -> None:
    """After a stop, too: a later run finds its own job, not the user's job.json."""
    source, box, calls = named_like_bookkeeping, tmp_path / "csf", []
    real = {"_convert_shard": convert._convert_shard, "source_bytes": restore.source_bytes}

    def stopping(name):
        def run_or_stop(*arguments):
            if len(calls) == stopped_at:
                raise KeyboardInterrupt
            calls.append(name)
            return real[name](*arguments)

        return run_or_stop

    def run_until_done(module, name, *arguments) -> None:
        if stopped_at is not None:
            calls.clear()
            monkeypatch.setattr(module, name, stopping(name))
            assert run(*arguments) == 130
            monkeypatch.setattr(module, name, real[name])
        assert run(*arguments) == 0

    run_until_done(convert, "_convert_shard", source, box)
    run_until_done(restore, "source_bytes", "--restore", box, tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(source)
    assert run("--verify", box) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "csf", "source"]


def test_a_serving_folder_holds_files_named_like_the_bookkeeping(
    named_like_bookkeeping: Path, made: Path, tmp_path: Path
) -> None:
    assert run("--serving-folder", made, tmp_path / "serve") == 0
    for name in BOOKKEEPING:
        assert (tmp_path / "serve" / name).read_text() == f'{{"user": "{name}"}}'


def test_a_partial_folder_of_the_old_layout_is_refused(
    source: Path, tmp_path: Path, capsys
) -> None:
    """It kept the result beside job.json, which had the same words without the layout's number."""
    work = workfolder.work_path(tmp_path / "csf")
    (work / "tensors").mkdir(parents=True)
    paths = sorted(source.glob("*.safetensors")) + [
        source / name for name in ("config.json", "model.safetensors.index.json", "tokenizer.json")
    ]
    job = {
        "what": "convert", "source": str(source), "family": "qwen3_moe_nvfp4",
        "files": workfolder.fingerprint(paths),
    }  # fmt: skip
    (work / "job.json").write_text(json.dumps(job))
    assert run(source, tmp_path / "csf") == 3
    assert f"run the command again after rm -r {work}" in capsys.readouterr().err
    assert (work / "tensors").is_dir()


def test_what_a_kill_after_the_rename_leaves_does_not_stop_the_next_job(
    source: Path, tmp_path: Path
) -> None:
    work = workfolder.work_path(tmp_path / "csf")
    work.mkdir()
    (work / "job.json").write_text('{"what": "something else"}')
    assert run(source, tmp_path / "csf") == 0
    assert not work.exists()


def test_printed_commands_can_be_pasted(source: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """Where a path holds a space and what a shell would expand."""
    place = tmp_path / "my $models; x"
    place.mkdir()

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "_convert_shard", interrupt)
    run(source, place / "csf")
    monkeypatch.undo()
    os.utime(source / "config.json", (1, 1))
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


MIXED = "MIXED_PRECISION"


@pytest.mark.parametrize(
    ("algorithms", "is_forced"),
    [
        (["NVFP4"], True),
        (["W4A16_NVFP4"], False),
        ([MIXED, "NVFP4", "FP8"], True),
        ([MIXED, "W4A16_NVFP4", "FP8"], False),
        ([MIXED, "W4A16_NVFP4", "NVFP4"], True),
    ],
)
@pytest.mark.parametrize("nested", [True, False])
def test_the_serve_command_forces_w4a16_where_the_source_needs_it(
    source: Path, tmp_path: Path, capsys, algorithms, is_forced, nested
) -> None:
    quantization = {"quant_algo": algorithms[0]}
    if algorithms[1:]:
        quantization["quantized_layers"] = {
            f"model.layers.{number}.mlp.experts": {"quant_algo": name}
            for number, name in enumerate(algorithms[1:])
        }
    if nested:
        quantization = {"quantization": quantization}
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", **quantization}
    (source / "config.json").write_text(json.dumps(config))
    assert run(source, tmp_path / "csf") == 0
    capsys.readouterr()
    assert cli.main(["--serving-folder", str(tmp_path / "csf"), str(tmp_path / "serve")]) == 0
    force = "VLLM_B12X_MOE_FP4_FORCE_A16=1 " if is_forced else ""
    assert capsys.readouterr().out == (
        f"{force}vllm serve {tmp_path / 'serve'} --quantization nvfp4_csf --load-format nvfp4_csf "
        "--moe-backend b12x\n"
    )


def test_a_serving_folder_takes_no_weights(source: Path, tmp_path: Path, capsys) -> None:
    """Weights in another form beside the index, as Mistral's repositories have them."""
    weights = {
        "consolidated.safetensors", "consolidated.safetensors.index.json", "pytorch_model-00001-of-00002.bin",
        "pytorch_model.bin.index.json", "model-Q4.GGUF",
    }  # fmt: skip
    others = {"chat_template.jinja", "tokenizer.model", "generation_config.json", "params.json"}
    for name in weights | others:
        (source / name).write_text(name)
    assert run(source, tmp_path / "csf") == 0
    capsys.readouterr()
    assert cli.main(["--serving-folder", str(tmp_path / "csf"), str(tmp_path / "serve")]) == 0
    said = capsys.readouterr().err
    found = {path.name for path in (tmp_path / "serve").iterdir()}
    assert found == others | {"config.json", "tokenizer.json"}
    assert "left out, weights" in said and all(name in said for name in weights)
    assert run("--restore", tmp_path / "csf", tmp_path / "back") == 0
    assert files_of(tmp_path / "back") == files_of(source)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_serving_folder_of_damaged_metadata_is_refused(
    made: Path, tmp_path: Path, capsys, name: str
) -> None:
    path = made / "metadata" / name
    path.write_bytes(path.read_bytes() + b" ")
    assert run("--serving-folder", made, tmp_path / "serve") == 1
    assert f"{path}: SHA-256 differs from manifest.json" in capsys.readouterr().err
    assert not (tmp_path / "serve").exists()


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


def test_a_changed_source_is_not_continued(
    source: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "_convert_shard", interrupt)
    run(source, tmp_path / "csf")
    monkeypatch.undo()
    os.utime(source / "config.json", (1, 1))
    assert run(source, tmp_path / "csf") == 3
    assert f"rm -r {tmp_path / '.csf.partial'}" in capsys.readouterr().err


def test_a_full_disk_keeps_finished_shards(
    source: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    real = files.HashingWriter.write

    def write(self, data):
        if "00003-of" in self._file.name:
            raise OSError(28, "No space left on device")
        real(self, data)

    monkeypatch.setattr(files.HashingWriter, "write", write)
    assert run(source, tmp_path / "csf") == 4
    assert "the disk is full" in capsys.readouterr().err
    assert len(list((tmp_path / ".csf.partial" / "payload" / "receipts").iterdir())) == 2
    assert not list(tmp_path.rglob(".*.tmp"))
    monkeypatch.undo()
    assert run(source, tmp_path / "csf") == 0
    assert run("--verify", tmp_path / "csf") == 0


def test_too_small_a_disk_is_refused_before_writing(
    source: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: usage._replace(free=10))
    assert run(source, tmp_path / "csf") == 3
    assert "needed" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def edit_header(path: Path, edit) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, {"format": "pt"})


def first(source: Path) -> Path:
    return source / "model-00001-of-00003.safetensors"


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


def rewrite(source: Path, edit) -> None:
    """*edit* maps the tensors of each shard to new ones; the index follows."""
    index = {}
    for path in sorted(source.glob("*.safetensors")):
        tensors = edit(load_file(path))
        save_file(tensors, path, {"format": "pt"})
        index |= dict.fromkeys(tensors, path.name)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


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


def test_what_stays_behind_is_said(source: Path, tmp_path: Path, capsys) -> None:
    (source / "figures").mkdir()
    (source / "gone.md").symlink_to("nowhere")
    assert cli.main([str(source), str(tmp_path / "csf")]) == 0
    assert "not carried along" in (said := capsys.readouterr().err)
    assert "figures, gone.md" in said


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


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def redo_hash(made: Path, file: str) -> None:
    """As if the damage had happened before the container's hashes were taken."""
    path = made / "manifest.json"
    manifest = json.loads(path.read_text())
    for record in manifest["shards"]:
        if record["file"] == file:
            record["target_sha256"] = files.sha256_of(made / "tensors" / file)
    path.write_text(json.dumps(manifest))


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


def edit_json(path: Path, edit) -> None:
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))


def some_shard(made: Path) -> Path:
    return sorted((made / "tensors").iterdir())[0]


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


def test_info_names_what_is_wrong_with_a_container(made: Path, capsys) -> None:
    contract = json.loads((made / "build-contract.json").read_text())
    contract["source_names"].pop("lm_head.weight")
    (made / "build-contract.json").write_text(json.dumps(contract))
    assert run("--info", made) == 1
    assert "lm_head.weight; build-contract.json does not name it" in capsys.readouterr().err


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


def test_serving_folder_names_the_container(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "serve"
    assert run("--serving-folder", made, folder) == 0
    quantization = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert quantization == {
        "quant_method": "nvfp4_csf",
        "format_version": 1,
        "checkpoint_root": str(made),
        "source_quantization_config": checkpoints.QUANTIZATION,
    }
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "tokenizer.json"]


@pytest.mark.parametrize("in_config", [True, False])
def test_serving_folder_names_the_layers_of_mixed_precision(source, tmp_path, in_config) -> None:
    """Where config.json does not name them vLLM reads hf_quant_config.json, which a serving folder has not."""
    layers = {"model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16}}
    nested = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "exclude_modules": []}
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config")
    if in_config:
        short = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
        config["quantization_config"] = short
    (source / "config.json").write_text(json.dumps(config))
    (source / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": nested})
    )
    assert run(source, tmp_path / "csf") == 0
    assert run("--serving-folder", tmp_path / "csf", tmp_path / "serve") == 0
    written = json.loads((tmp_path / "serve" / "config.json").read_text())["quantization_config"]
    assert written["source_quantization_config"] == {
        "producer": {"name": "modelopt"},
        "quantization": nested,
        "quant_method": "modelopt",
        "quantized_layers": layers,
    }


def test_serving_folder_of_a_config_with_an_empty_text_config(source: Path, tmp_path: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    quantization = {
        "quantization": config.pop("quantization_config"),
        "producer": {"name": "modelopt"},
    }
    (source / "config.json").write_text(json.dumps({**config, "text_config": None}))
    (source / "hf_quant_config.json").write_text(json.dumps(quantization))
    assert run(source, tmp_path / "csf") == 0
    assert run("--serving-folder", tmp_path / "csf", tmp_path / "serve") == 0
    written = json.loads((tmp_path / "serve" / "config.json").read_text())["quantization_config"]
    assert written["source_quantization_config"]["producer"] == {"name": "modelopt"}


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
