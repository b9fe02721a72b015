# SPDX-License-Identifier: Apache-2.0
"""The wheel target: a new wheel that pip installs, checks and uninstalls."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import zipfile
from pathlib import Path

import pytest
from apply.factory import PYTHON, REPO, VERSION, Project, Series, contents
from apply.wheels import STAMP, TAG, wheel
from b12x_overlay.patching import patchset, record
from support import paths


@pytest.fixture
def original(tmp_path: Path, series: Series) -> Path:
    return wheel(tmp_path / "in", series.base)


def patched(made: Project, original: Path, folder: Path) -> Path:
    result = made.run("--target", original, "--output", folder)
    assert result.code == 0, result.text
    (path,) = folder.glob("*.whl")
    return path


def test_the_new_wheel(made: Project, original: Path, tmp_path: Path, series: Series) -> None:
    before = original.read_bytes()
    result = patched(made, original, tmp_path / "out")
    assert original.read_bytes() == before
    assert result.name == f"vllm-{VERSION}+b12x.1-{TAG}.whl"
    info = f"vllm-{VERSION}+b12x.1.dist-info"
    with zipfile.ZipFile(original) as old, zipfile.ZipFile(result) as new:
        assert new.testzip() is None
        names = new.namelist()
        assert names[-1] == f"{info}/RECORD"
        assert not [name for name in names if name.startswith(f"vllm-{VERSION}.dist-info/")]
        for path, data in series.final().items():
            assert new.read(path) == data
        metadata = new.read(f"{info}/METADATA").decode().splitlines()
        assert metadata[2:4] == [f"Version: {VERSION}+b12x.1", f"Summary: Version: {VERSION}"]
        rows = [line.split(",") for line in new.read(f"{info}/RECORD").decode().splitlines()]
        assert sorted(row[0] for row in rows) == sorted(names)
        for path, digest, size in rows[:-1]:
            if path != f"{info}/RECORD":
                data = new.read(path)
                assert (digest, size) == (record.row_hash(data), str(len(data))), path
        assert {member.date_time for member in new.infolist()} == {STAMP}
        for member in old.infolist():
            same = new.getinfo(
                member.filename.replace(f"vllm-{VERSION}.", f"vllm-{VERSION}+b12x.1.")
            )
            assert same.external_attr == member.external_attr
            assert same.compress_type == member.compress_type


def test_the_same_input_gives_the_same_bytes(made: Project, original: Path, tmp_path: Path) -> None:
    first, second = (
        patched(made, original, tmp_path / "one"),
        patched(made, original, tmp_path / "two"),
    )
    assert first.read_bytes() == second.read_bytes()


class Pipe(io.RawIOBase):
    """A stream that cannot seek: zipfile then writes sizes behind the data, as some wheel builders do."""

    def __init__(self, out: io.BufferedWriter) -> None:
        self.out = out

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        return self.out.write(data)  # type: ignore[arg-type]


def test_a_streamed_wheel_gets_plain_headers(made: Project, original: Path, tmp_path: Path) -> None:
    streamed = tmp_path / "streamed" / original.name
    streamed.parent.mkdir()
    with (
        zipfile.ZipFile(original) as old,
        streamed.open("wb") as out,
        zipfile.ZipFile(Pipe(out), "w") as new,
    ):  # type: ignore[arg-type]
        for member in old.infolist():
            new.writestr(member, old.read(member))
    with zipfile.ZipFile(streamed) as archive:
        assert all(member.flag_bits & 0x08 for member in archive.infolist())
    result = patched(made, streamed, tmp_path / "out")
    data = result.read_bytes()
    end = 0
    with zipfile.ZipFile(result) as archive:
        assert archive.testzip() is None
        for member in archive.infolist():  # back to back, each local header like its central one
            assert member.header_offset == end
            head = struct.unpack("<4s5H3L2H", data[end : end + 30])
            assert head[2] == member.flag_bits
            assert not member.flag_bits & 0x08
            assert head[6:9] == (member.CRC, member.compress_size, member.file_size)
            assert data[end + 30 : end + 30 + head[9]].decode() == member.filename
            end += 30 + head[9] + head[10] + member.compress_size


def test_reading_verbs_and_dry_run(made: Project, original: Path, tmp_path: Path) -> None:
    assert made.json("status", "--target", original)["state"] == "not-applied"
    assert made.run("--target", original, "--dry-run").code == 1
    assert not (made.root / "build/wheels").exists()
    result = patched(made, original, tmp_path / "out")
    for verb in ("status", "verify"):
        assert made.run(verb, "--target", result).code == 0
    again = made.json("--target", result)
    assert (again["outcome"], again["exit"]) == ("already applied", 0)
    assert made.run("revert", "--target", result).code == 3


@pytest.mark.parametrize(
    ("version", "local"),
    [("0.33.0+cu129", "0.33.0+cu129.b12x.1"), ("0.33.0+b12x.7", "0.33.0+b12x.1")],
)
def test_local_versions(
    made: Project, tmp_path: Path, series: Series, version: str, local: str
) -> None:
    result = patched(made, wheel(tmp_path / "in", series.base, version=version), tmp_path / "out")
    assert result.name == f"vllm-{local}-{TAG}.whl"


def test_refusals(made: Project, tmp_path: Path, series: Series) -> None:
    other = wheel(tmp_path / "other", series.base, version="0.32.0")
    assert "0.32.0" in made.run("--target", other).err
    edited = wheel(tmp_path / "edited", {**series.base, "vllm/a.py": b"x\n"})
    assert made.run("--target", edited).code == 3
    broken = tmp_path / "vllm-0.33.0-py3-none-any.whl"
    broken.write_bytes(wheel(tmp_path / "in", series.base).read_bytes()[:-40])
    result = made.run("--target", broken)
    assert (result.code, "damaged or truncated" in result.err) == (3, True)
    renamed = broken.rename(tmp_path / "torch-0.33.0-py3-none-any.whl")
    assert made.run("--target", renamed).code == 3
    assert made.run("--target", tmp_path / "nothing.whl").code == 3
    assert not (made.root / "build/wheels").exists()


def test_a_full_disk_leaves_no_half_wheel(made: Project, original: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = made.run("--target", original, "--output", out, preexec_fn=limit_file_size)
    assert result.code == 4
    assert list(out.iterdir()) == []


def limit_file_size() -> None:
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))


def test_pip_installs_checks_and_uninstalls_it(
    made: Project, original: Path, tmp_path: Path, series: Series
) -> None:
    result = patched(made, original, tmp_path / "out")
    venv = tmp_path / "venv"
    subprocess.run([PYTHON, "-m", "venv", venv], check=True)
    python = venv / "bin/python"
    site = next(venv.glob("lib/python*/site-packages"))

    def pip(*args: str | Path) -> str:
        command = [python, "-m", "pip", "--disable-pip-version-check", *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    before = set(contents(site))
    pip("install", "--no-deps", "--no-index", result)
    assert "No broken requirements" in pip("check")
    assert {"name": "vllm", "version": f"{VERSION}+b12x.1"} in json.loads(
        pip("list", "--format=json")
    )
    run = subprocess.run(
        [python, "-c", "import vllm.new.logic as m; print(m.ANSWER)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == "42\n"
    assert (site / "vllm/tool.sh").stat().st_mode & 0o111
    assert made.run("verify", "--target", "installed", python=(str(python),)).code == 0
    pip("uninstall", "--yes", "vllm")
    left = {name for name in set(contents(site)) - before if "/pip/" not in f"/{name}"}
    assert left == set()

    # and the other way round: the original wheel, patched in place, is gone after uninstall too
    pip("install", "--no-deps", "--no-index", original)
    assert made.run("--target", "installed", python=(str(python),)).code == 0
    assert made.run("verify", "--target", "installed", python=(str(python),)).code == 0
    assert "No broken requirements" in pip("check")
    pip("uninstall", "--yes", "vllm")
    assert {name for name in set(contents(site)) - before if "/pip/" not in f"/{name}"} == set()


def test_the_real_wheel(tmp_path: Path) -> None:
    """The pinned x86_64 wheel that the test environment holds, patched by this repository's set."""
    pinned = patchset.load(REPO / "patches", REPO / "overlay").pin.wheels
    names = [paths.SOURCES / pin.filename for pin in pinned]
    real = next((path for path in names if path.exists()), None)
    if real is None:
        pytest.skip(f"none of the pinned wheels is in {paths.SOURCES}; scripts/test fetches one")
    command = [
        str(REPO / "scripts/apply-patches"),
        "--target",
        str(real),
        "--output",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"this is the pinned {real.name}" in done.stdout
    (result,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(real) as old, zipfile.ZipFile(result) as new:
        info = next(name for name in new.namelist() if name.endswith(".dist-info/RECORD"))
        listed = set(record.paths(new.read(info)))
        assert listed == set(new.namelist())
        same = set(old.namelist()) & set(new.namelist())
        assert len(same) > 5000
        changed = {name for name in same if old.getinfo(name).CRC != new.getinfo(name).CRC}
        loaded = patchset.load(REPO / "patches", REPO / "overlay")
        assert changed == set(loaded.chains)
    verify = [str(REPO / "scripts/apply-patches"), "verify", "--target", str(result)]
    assert subprocess.run(verify, capture_output=True, check=False).returncode == 0
    result.unlink()
