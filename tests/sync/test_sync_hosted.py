# SPDX-License-Identifier: Apache-2.0
"""The hosted run: the workflow file is valid, and its script keeps one pull request and one issue without noise.

gh is a stand-in that keeps pull requests and issues in a folder and logs what is asked of it; the remote, the clone
and the sync are real.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from b12x_overlay.lines import LINES_FILE, read_lines
from b12x_overlay.paths import REPO
from sync.repos import COMMAND, Repo

WORKFLOW = REPO / ".github" / "workflows" / "sync-beta.yml"
SCRIPT = REPO / ".ci" / "sync-beta"
GH = """#!{python}
import json, pathlib, subprocess, sys
store = pathlib.Path({store!r})
data = json.loads(store.read_text()) if store.exists() else {{"pr": [], "issue": [], "log": []}}
what, verb, *rest = sys.argv[1:]
flags = dict(zip(rest, rest[1:]))
body = pathlib.Path(flags["--body-file"]).read_text() if "--body-file" in flags else None
if verb in ("create", "edit", "close"):
    data["log"].append(f"{{what}} {{verb}}")
if verb == "create":
    head = flags.get("--head")
    data[what].append({{"number": len(data[what]) + 1, "title": flags["--title"], "body": body, "state": "open",
                       "head": head, "base": flags.get("--base")}})
found = [one for one in data[what] if str(one["number"]) == rest[0]] if rest and rest[0].isdigit() else []
if verb == "edit":
    found[0]["body"] = body
if verb == "close":
    found[0]["state"] = "closed"
if verb in ("list", "view"):
    state = flags.get("--state")
    chosen = found or [one for one in data[what] if state in ("all", one["state"])
                       and all(one[key] == flags.get("--" + key, one[key]) for key in ("head", "base"))]
    for one in chosen:
        if one["head"]:
            tip = subprocess.run(["git", "-C", {remote!r}, "rev-parse", "refs/heads/" + one["head"]],
                                 capture_output=True, text=True).stdout.strip()
            one["headRefOid"] = tip if one["state"] == "open" else one.get("closedAt", tip)
    shown = json.dumps(chosen[0] if verb == "view" else chosen)
    done = subprocess.run(["jq", "-r", flags["--jq"]], input=shown, text=True, capture_output=True)
    sys.stderr.write(done.stderr)
    sys.stdout.write(done.stdout)
    store.write_text(json.dumps(data))
    sys.exit(done.returncode)
store.write_text(json.dumps(data))
"""


class Hosted:
    """A remote, a clone as the workflow has it, and the script with a stand-in for gh."""

    def __init__(self, folder: Path, remote: Repo) -> None:
        self.remote = remote
        self.store = folder / "github.json"
        self.clone = folder / "clone"
        lines = '[lines]\ncanonical = "main"\nbeta = "beta"\n'
        self.remote.on("main").commit(
            "lines", {".ci/lines.toml": lines, ".ci/sync-beta": SCRIPT.read_bytes()}
        )
        self.remote.git("branch", "-f", "beta", "main")
        self.remote.git("switch", "-q", "--detach")
        self.remote.git("clone", "-q", str(remote.path), str(self.clone))
        (self.clone / "scripts").mkdir()
        self._program(
            self.clone / "scripts" / "sync-beta",
            f"#!{COMMAND[0]}\n{COMMAND[2]}\n",
        )
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        self._program(
            bin_folder / "gh",
            GH.format(python=sys.executable, store=str(self.store), remote=str(remote.path)),
        )
        self.env = {**remote.env, "PATH": f"{bin_folder}:{os.environ['PATH']}"}

    @staticmethod
    def _program(path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def run(self) -> tuple[int, list[str]]:
        """Run the script as the workflow does; its exit status and what it asked gh to change."""
        before = self.log()
        done = subprocess.run(
            ["bash", str(self.clone / ".ci" / "sync-beta")], cwd=self.clone, env=self.env, capture_output=True, text=True,
            check=False, timeout=300,
        )  # fmt: skip
        self.told = done.stdout + done.stderr
        return done.returncode, self.log()[len(before) :]

    def data(self) -> dict:
        return (
            json.loads(self.store.read_text())
            if self.store.exists()
            else {"pr": [], "issue": [], "log": []}
        )

    def log(self) -> list[str]:
        return self.data()["log"]

    def change(self, branch: str, message: str, line: int, text: str) -> None:
        self.remote.on(branch).edit(message, line, text)
        self.remote.git("switch", "-q", "--detach")


@pytest.fixture
def hosted(repo: Repo, tmp_path: Path) -> Hosted:
    if shutil.which("jq") is None:
        pytest.skip("the script needs jq, which GitHub's runners have; apt-get install jq")
    return Hosted(tmp_path, repo)


def test_one_pull_request_and_no_noise(hosted: Hosted) -> None:
    assert hosted.run() == (0, []), hosted.told  # nothing to do
    hosted.change("main", "change <b>@octocat</b>", 3, "x")
    assert hosted.run() == (0, ["pr create"]), hosted.told
    assert hosted.run() == (0, []), hosted.told
    (pull,) = hosted.data()["pr"]
    assert (pull["head"], pull["base"]) == ("sync/canonical-to-beta", "beta")
    assert "change \\<b>@<!-- -->octocat" in pull["body"]
    hosted.change("main", "one more", 12, "y")
    assert hosted.run() == (0, ["pr edit"]), hosted.told
    assert "one more" in hosted.data()["pr"][0]["body"]
    assert hosted.run() == (0, []), hosted.told
    hosted.remote.git("branch", "-f", "beta", "sync/canonical-to-beta")  # merged
    assert hosted.run() == (0, []), hosted.told


def test_a_closed_pull_request_stays_closed_until_there_is_something_new(hosted: Hosted) -> None:
    hosted.change("main", "change", 3, "x")
    assert hosted.run() == (0, ["pr create"]), hosted.told
    data = hosted.data()
    data["pr"][0] |= {"state": "closed", "closedAt": hosted.remote.tip("sync/canonical-to-beta")}
    hosted.store.write_text(json.dumps(data))
    assert hosted.run() == (0, []), hosted.told
    hosted.change("main", "one more", 12, "y")
    assert hosted.run() == (0, ["pr create"]), hosted.told


def test_a_pull_request_that_could_not_be_opened_is_opened_by_the_next_run(hosted: Hosted) -> None:
    hosted.change("main", "change", 3, "x")
    assert hosted.run() == (0, ["pr create"]), hosted.told
    hosted.store.unlink()  # as if gh had failed after the push
    assert hosted.run() == (0, ["pr create"]), hosted.told


def test_one_issue_while_a_person_is_needed(hosted: Hosted) -> None:
    hosted.change("main", "clash", 3, "x")
    hosted.change("beta", "own", 3, "y")
    assert hosted.run() == (5, ["issue create"]), hosted.told
    assert "code.py:3" in hosted.data()["issue"][0]["body"]
    assert hosted.run() == (5, []), hosted.told
    hosted.change("main", "clash again", 4, "x")
    assert hosted.run() == (5, []), hosted.told  # the same conflict
    hosted.change("beta", "own again", 4, "z")
    assert hosted.run() == (5, ["issue edit"]), hosted.told
    hosted.remote.git("branch", "-f", "beta", "main")  # put right
    assert hosted.run() == (0, ["issue close"]), hosted.told
    assert hosted.run() == (0, []), hosted.told


def test_a_network_that_is_down_is_red_and_silent(hosted: Hosted) -> None:
    hosted.change("main", "change", 3, "x")
    hosted.remote.path.rename(hosted.remote.path.with_name("away"))
    assert hosted.run() == (4, []), hosted.told
    assert "unknown" in hosted.told


def test_the_workflow_and_the_lines_file_agree() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text())
    lines = read_lines(REPO / LINES_FILE)
    triggers = workflow[True]  # YAML 1.1 reads "on" as true
    assert triggers["push"]["branches"] == [lines.canonical]
    assert triggers["schedule"]
    assert workflow["concurrency"]["cancel-in-progress"] is False
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert [step["run"] for step in steps if "run" in step] == [".ci/sync-beta"]
    assert all(
        "@" in step["uses"] and len(step["uses"].split("@")[1]) == 40
        for step in steps
        if "uses" in step
    )
    assert steps[0]["with"]["fetch-depth"] == 0


def tool(name: str) -> str:
    path = Path(sys.executable).with_name(name)
    assert path.exists(), f"{path}: install scripts/requirements/test.txt"
    return str(path)


def test_actionlint_finds_nothing() -> None:
    done = subprocess.run(
        [tool("actionlint"), "-shellcheck", tool("shellcheck"), str(WORKFLOW)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_actionlint_would_find_something(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yml"
    broken.write_text(WORKFLOW.read_text().replace("runs-on", "run-on"))
    assert (
        subprocess.run(
            [tool("actionlint"), str(broken)], capture_output=True, check=False
        ).returncode
        == 1
    )


def test_shellcheck_finds_nothing() -> None:
    done = subprocess.run(
        [tool("shellcheck"), str(SCRIPT)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
