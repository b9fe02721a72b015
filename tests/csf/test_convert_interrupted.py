# SPDX-License-Identifier: Apache-2.0
"""``convert-csf`` when it is interrupted, killed, or finds what an earlier run left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from b12x_overlay.csf import convert, files, restore, workfolder
from b12x_overlay.paths import REPO
from csf.convert_support import (
    files_of,
    interrupt_then_change,
    run,
)


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


def test_a_changed_source_is_not_continued(
    source: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    interrupt_then_change(monkeypatch, source, tmp_path / "csf")
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
