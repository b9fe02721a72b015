# SPDX-License-Identifier: Apache-2.0
"""The command line: read-only isolated Python, first run without a target, usage, colour, machine output, bump."""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from apply.conftest import A
from apply.factory import PYTHON, REPO, Project, Series, contents, lay, snapshot
from b12x_overlay.patching import patchset
from support import paths


def sdist(
    folder: Path,
    files: dict[str, bytes],
    version: str = "0.33.0",
    extra: tarfile.TarInfo | None = None,
) -> Path:
    """A small source distribution."""
    path = folder / f"vllm-{version}.tar.gz"
    folder.mkdir(parents=True, exist_ok=True)
    everything = {
        "PKG-INFO": f"Name: vllm\nVersion: {version}\n".encode(),
        "vllm/__init__.py": b"",
        **files,
    }
    with tarfile.open(path, "w:gz") as tar:
        for name, data in everything.items():
            member = tarfile.TarInfo(f"vllm-{version}/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        if extra is not None:
            tar.addfile(extra)
    return path


@pytest.fixture
def fetched(made: Project, series: Series) -> Path:
    """The pinned source distribution, already in build/sources."""
    path = sdist(made.root / "build/sources", series.base)
    pin(made, path)
    return path


def all_but_apply(folder: str, names: list[str]) -> set[str]:
    """For copytree: of all environments only the command's own is copied."""
    return {
        name for name in names if Path(folder).name == "venvs" and not name.startswith("apply-")
    }


def pin(made: Project, path: Path) -> None:
    file = made.root / "patches/patchset.toml"
    text = file.read_text()
    old = text.split('sha256 = "')[1].split('"')[0]
    file.write_text(text.replace(old, hashlib.sha256(path.read_bytes()).hexdigest(), 1))


class TestIsolated:
    """What a container has: python3 and nothing else, the command on a read-only folder."""

    @pytest.fixture
    def readonly(self, made: Project) -> Project:
        for path in [made.root, *made.root.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else path.stat().st_mode & 0o555)
        return made

    def test_python_alone_does_it(self, readonly: Project, site: Path, series: Series) -> None:
        original, here = snapshot(site), snapshot(readonly.root)
        flags = (getattr(sys, "_base_executable", PYTHON), "-I", "-S")
        env = {
            "PATH": "/nonexistent",
            "B12X_OVERLAY_BUILD": "/nonexistent",
        }  # no git, no patch, nothing to write to
        for verb, code in (
            ("status", 1),
            ("apply", 0),
            ("apply", 0),
            ("verify", 0),
            ("list", 0),
            ("revert", 0),
        ):
            target = () if verb == "list" else ("--target", site)
            result = readonly.run(verb, *target, python=flags, env=env)
            assert result.code == code, result.text
            if verb == "verify":
                for path, data in series.final().items():
                    assert contents(site)[path] == data
        assert snapshot(site) == original
        assert snapshot(readonly.root) == here  # no bytecode either

    def test_only_the_standard_library_is_imported(self, made: Project, site: Path) -> None:
        code = (
            "import sys, runpy; sys.argv = [sys.argv[1], '--target', sys.argv[2], '-q']\n"
            "try: runpy.run_path(sys.argv[0], run_name='__main__')\nexcept SystemExit as end: assert end.code == 0\n"
            "print(sorted({m.partition('.')[0] for m in sys.modules} - set(sys.stdlib_module_names)))"
        )
        command = [PYTHON, "-I", "-S", "-c", code, str(made.command), str(site)]
        out = subprocess.run(
            command, capture_output=True, text=True, check=True, env=made.env
        ).stdout
        assert out.strip() == "['__main__', 'b12x_overlay']" or out.strip() == "['b12x_overlay']"

    def test_an_old_python_gets_a_clear_message(self, made: Project) -> None:
        text = made.command.read_text()
        ast.parse(text, feature_version=(3, 6))
        assert "from __future__" not in text  # annotations came with 3.7
        old = text.replace("(3, 11)", "(99, 0)")
        made.command.write_text(old)
        result = made.run("status")
        assert result.code == 4
        assert "Python 3.11 or newer is needed" in result.err
        assert "next: python3.11" in result.err


class TestWithoutTarget:
    """The first command of the README."""

    def test_first_and_second_run(self, made: Project, fetched: Path, series: Series) -> None:
        assert made.run("status").code == 1
        assert made.run("--dry-run").code == 1
        assert not (made.root / "build/sources/vllm-0.33.0").exists()
        first = made.run()
        assert first.code == 0, first.text
        assert first.out.splitlines()[-1].startswith("next: ")
        tree = made.root / "build/sources/vllm-0.33.0"
        for path, data in series.final().items():
            assert (tree / path).read_bytes() == data
        assert made.json()["outcome"] == "already applied"
        assert made.run("status").code == 0
        assert made.run("revert").code == 0
        assert (tree / "vllm/a.py").read_bytes() == A

    def test_a_damaged_download_is_refused(self, made: Project, fetched: Path) -> None:
        fetched.write_bytes(fetched.read_bytes() + b"x")
        result = made.run()
        assert result.code == 3
        assert "sha256" in result.err
        assert f"rm {fetched}" in result.err
        assert not (made.root / "build/sources/vllm-0.33.0").exists()

    def test_without_network_it_says_what_to_do(self, made: Project, build: Path) -> None:
        shutil.copytree(
            build / "venvs", made.root / "build/venvs", symlinks=True, ignore=all_but_apply
        )
        result = made.run(env={"PIP_INDEX_URL": "http://127.0.0.1:9/simple/"})
        assert result.code == 4
        assert "cannot fetch from http://127.0.0.1:9/simple/" in result.err
        assert str(made.root / "build/sources") in result.err
        assert list((made.root / "build/sources").iterdir()) == []

    def test_without_an_environment_the_way_round_it_is_said(
        self, made: Project, fetched: Path
    ) -> None:
        data = fetched.read_bytes()
        fetched.unlink()
        offline = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple/", "PIP_RETRIES": "0"}
        result = made.run("--json", env=offline)
        assert (result.code, json.loads(result.out)["error"]["reason"]) == (4, "environment")
        last = result.err.splitlines()[-1]
        assert last == f"next: with {fetched.name} in {fetched.parent} no environment is needed"
        fetched.write_bytes(data)
        assert made.run(env=offline).code == 0

    def test_another_users_environment_is_named(self, made: Project) -> None:
        env = {"B12X_OVERLAY_BUILD": str(made.root / "build")}
        code = "from b12x_overlay import bootstrap; print(bootstrap.environment('apply'))"
        home = Path(
            subprocess.run(
                [PYTHON, "-c", code], cwd=made.root / "scripts", env={**made.env, **env},
                capture_output=True, text=True, check=True,
            ).stdout.strip()
        )  # fmt: skip
        (home / "bin").mkdir(parents=True)
        (home / "bin/python").write_text("")
        (home / ".complete").touch()
        result = made.run(env=env)
        assert result.code == 4
        assert f"error: {home / 'bin/python'} cannot be run by this user" in result.err
        assert "next: set B12X_OVERLAY_BUILD to a folder of your own" in result.err

    @pytest.mark.parametrize(
        "kind", ["symlink", "hardlink", "dots", "absolute", "second", "device"]
    )
    def test_an_archive_that_would_leave_its_folder_is_refused(
        self, made: Project, series: Series, kind: str
    ) -> None:
        extra = tarfile.TarInfo("vllm-0.33.0/vllm/x.py")
        if kind in ("symlink", "hardlink"):
            extra.type = tarfile.SYMTYPE if kind == "symlink" else tarfile.LNKTYPE
            extra.linkname = "/etc/passwd"
        elif kind == "device":
            extra.type = tarfile.CHRTYPE
        else:
            extra.name = {"dots": "vllm-0.33.0/../../x", "absolute": "/tmp/x", "second": "other/x"}[
                kind
            ]
        pin(made, sdist(made.root / "build/sources", series.base, extra=extra))
        result = made.run()
        assert result.code == 3
        assert [path.name for path in (made.root / "build/sources").iterdir()] == [
            "vllm-0.33.0.tar.gz"
        ]


class TestUsage:
    """Exit code 2, and help that suffices."""

    @pytest.mark.parametrize(
        "args",
        [["nonsense"], ["bump"], ["apply", "/some/tree"], ["revert", "--commit"], ["--output", "x"], ["export"],
         ["-v", "-q"], ["--target", ""], ["--color", "blue"], ["list", "--target", "x"], ["bump", "1.0", "--target", "x"],
         ["--commit", "--target", "installed"], ["export", "--target", "installed"]],
    )  # fmt: skip
    def test_wrong_use(self, made: Project, args: list[str]) -> None:
        result = made.run(*args)
        assert result.code == 2
        assert "usage:" in result.err

    def test_help_names_verbs_targets_and_exit_codes(self, made: Project) -> None:
        text = made.run("--help").out
        for word in (
            "apply",
            "revert",
            "status",
            "verify",
            "list",
            "export",
            "bump",
            "installed",
            ".whl",
            "130",
        ):
            assert word in text

    @pytest.mark.parametrize("target", ["/nonexistent", "."])
    def test_a_target_without_vllm(self, made: Project, tmp_path: Path, target: str) -> None:
        result = made.run("--target", target, cwd=tmp_path)
        assert result.code == 3
        assert "next:" in result.err


class TestOutput:
    """--json, --color, -q, a closed pipe."""

    def test_json_alone_on_stdout(self, made: Project, site: Path) -> None:
        for verb in ("status", "apply", "verify", "list", "revert"):
            target = () if verb == "list" else ("--target", site)
            result = made.run(verb, *target, "--json")
            json.loads(result.out)
            assert "patch" in result.err

    def test_reason_codes_are_there(self, made: Project, site: Path) -> None:
        (site / "vllm/a.py").write_bytes(b"x\n")
        document = made.json("--target", site)
        file = document["patches"][0]["files"][0]
        assert {"path", "role", "state", "reason", "detail", "wanted", "found"} == set(file)
        assert len(file["found"]) == len(file["wanted"]) == 64

    def test_colour(self, made: Project, site: Path) -> None:
        assert "\x1b[" not in made.run("status", "--target", site).out
        assert "\x1b[" in made.run("status", "--target", site, "--color", "always").out
        assert "\x1b[" not in made.run("status", "--target", site, env={"NO_COLOR": "1"}).out

    def test_quiet(self, made: Project, site: Path) -> None:
        result = made.run("--target", site, "-q")
        assert (result.code, result.text) == (0, "")

    def test_a_closed_pipe_is_no_error(self, made: Project, site: Path) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        command = [PYTHON, str(made.command), "list"]
        done = subprocess.run(
            command, stdout=writer, stderr=subprocess.PIPE, check=False, env=made.env
        )
        os.close(writer)
        assert b"Traceback" not in done.stderr


class TestBump:
    """Another vLLM, judged and left alone."""

    def test_every_kind(self, made: Project, tmp_path: Path, series: Series) -> None:
        absorbed = series.patches[0][1]["vllm/a.py"]
        other = lay(
            tmp_path / "other",
            {"vllm/a.py": b"# new\n" + absorbed, "vllm/new/logic.py": b"theirs\n"},
        )
        before = snapshot(other)
        document = made.json("bump", other)
        first, second = document["patches"]
        assert (document["exit"], first["fit"], second["fit"]) == (1, "absorbed", "conflict")
        assert second["files"][0]["fit"] == "moved"
        assert second["files"][0]["hunks"][0]["offset"] == 1
        assert second["files"][1]["detail"] == "the file is gone"
        assert document["overlay_taken"] == ["vllm/new/logic.py"]
        assert snapshot(other) == before

    def test_a_moved_file_is_suggested(self, made: Project, tmp_path: Path, series: Series) -> None:
        other = lay(
            tmp_path / "other", {"vllm/a.py": A, "vllm/deep/b.py": series.base["vllm/sub/b.py"]}
        )
        assert "vllm/deep/b.py" in made.run("bump", other).out

    def test_the_same_release_is_exact(self, made: Project, fetched: Path, tree: Path) -> None:
        for other in (fetched, tree):
            document = made.json("bump", other)
            assert (document["exit"], {patch["fit"] for patch in document["patches"]}) == (
                0,
                {"exact"},
            )

    def test_a_conflict_names_place_wanted_and_found(
        self, made: Project, tmp_path: Path, series: Series
    ) -> None:
        other = lay(
            tmp_path / "other",
            {**series.base, "vllm/sub/b.py": b"import os\n\n\ndef go():\n    return 1\n"},
        )
        out = made.run("bump", other).out
        assert "vllm/sub/b.py:4: conflict: wanted 'def run():', found 'def go():'" in out
        assert "patches/second.patch:" in out

    def test_dry_run_fetches_nothing(self, made: Project) -> None:
        result = made.run("bump", "0.32.0", "--dry-run")
        assert result.code == 1
        assert "fetches nothing" in result.err
        assert not (made.root / "build").exists()

    def test_neither_version_nor_file(self, made: Project) -> None:
        assert made.run("bump", "newest").code == 2


def test_the_real_set_on_the_real_files(tmp_path: Path) -> None:
    """This repository's set on vLLM's own files, as installed by pip: apply, verify, revert to the same bytes."""
    stock = paths.TEST_ENV / "stock"
    if not stock.is_dir():
        pytest.skip(f"{stock} is missing; scripts/test makes it")
    loaded = patchset.load(REPO / "patches", REPO / "overlay")
    names = ["vllm/__init__.py", *loaded.chains]
    site = lay(tmp_path / "site", {name: (stock / name).read_bytes() for name in names})
    info = next(stock.glob("vllm-*.dist-info"))
    for name in ("METADATA", "RECORD"):
        (site / info.name).mkdir(exist_ok=True)
        (site / info.name / name).write_bytes((info / name).read_bytes())
    before = snapshot(site)
    command = str(REPO / "scripts/apply-patches")
    for verb in ("apply", "verify", "revert"):
        done = subprocess.run(
            [command, verb, "--target", str(site)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert snapshot(site) == before
