# SPDX-License-Identifier: Apache-2.0
"""Self-set-up: a command that needs libraries makes its own virtual environment on first use.

``reexec("qualify")`` at the top of a command returns at once if the running interpreter already is that
environment's; otherwise it creates ``build/venvs/qualify-<digest>`` from ``scripts/requirements/qualify.txt`` and
replaces the process by the same command line under it. What ``qualify-nodeps.txt`` lists, where there is one, is
installed after it and without dependencies. The digest covers both files, so that a change of a pin makes a new
environment and never half-updates an old one. Standard library only.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from b12x_overlay.exitcodes import ExitCode
from b12x_overlay.paths import REPO, REQUIREMENTS, build_dir

MOST_WARNINGS = 3
_MARK = ".complete"


class SetupError(RuntimeError):
    """The environment could not be made; the message says what to install or change."""


def environment(name: str) -> Path:
    """Path of the virtual environment *name*, whether or not it exists yet."""
    digest = hashlib.sha256()
    for requirements, _ in _requirement_files(name):
        digest.update(requirements.read_bytes())
    digest.update(f"{sys.version_info[:2]}".encode())
    return build_dir() / "venvs" / f"{name}-{digest.hexdigest()[:12]}"


def ensure(name: str) -> Path:
    """Create the environment *name* if need be and return its interpreter.

    Raises:
        SetupError: no ``venv`` or ``pip`` in this Python, a failed download, a read-only build folder.
    """
    home = environment(name)
    python = home / "bin" / "python"
    if (home / _MARK).exists():
        return python
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        lock = (home.parent / f".{home.name}.lock").open("w")
    except OSError as error:
        raise SetupError(
            f"cannot write {home.parent}: {error.strerror}. Set B12X_OVERLAY_BUILD to a folder that can be written."
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"waiting for another run that sets up {home.name}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / _MARK).exists():
            _create(name, home, python)
    return python


def reexec(name: str) -> None:
    """Continue this command under the environment *name*; returns only when already there."""
    sys.excepthook = _excepthook
    home = environment(name)
    if Path(sys.prefix).resolve() == home.resolve():
        return
    try:
        python = ensure(name)
    except SetupError as error:
        _fail(str(error))
    env = dict(os.environ)
    for variable in ("PYTHONHOME", "PYTHONPATH"):  # would mix another Python's packages into ours
        env.pop(variable, None)
    os.execve(python, [str(python), *sys.argv], env)


def _excepthook(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Ctrl-C while an environment is set up or the libraries are imported is no fault: no traceback."""
    if issubclass(kind, KeyboardInterrupt):
        _say("error: interrupted")
    else:
        sys.__excepthook__(kind, error, trace)


def _create(name: str, home: Path, python: Path) -> None:
    _say(f"setting up {home} (once)")
    shutil.rmtree(home, ignore_errors=True)  # left by an interrupted run
    without = importlib.util.find_spec("ensurepip") is None
    _run(
        [sys.executable, "-m", "venv", str(home)],
        "this Python cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv"
        if without
        else f"cannot make a virtual environment in {home}; check the space and the rights there, or set "
        "B12X_OVERLAY_BUILD to another folder",
    )
    for requirements, options in _requirement_files(name):
        _say(f"installing {requirements.relative_to(REPO)}")
        _run(
            [
                str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile",
                "--no-input", *options, "-r", str(requirements),
            ],
            f"pip could not install {requirements.relative_to(REPO)}; check the network or pip's index settings, "
            "then run the command again",
        )  # fmt: skip
    (home / _MARK).touch()


def _requirement_files(name: str) -> list[tuple[Path, list[str]]]:
    """The files to install from, in order, each with its pip options."""
    files: list[tuple[Path, list[str]]] = [(REQUIREMENTS / f"{name}.txt", [])]
    without = REQUIREMENTS / f"{name}-nodeps.txt"
    if without.exists():
        files.append((without, ["--no-deps"]))
    return files


def _run(command: list[str], hint: str) -> None:
    """Run *command*; its first warnings are shown as they come, or a network that pip waits for would look like work."""
    lines: list[str] = []
    warnings = 0
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith("WARNING"):
                warnings += 1
                if warnings <= MOST_WARNINGS:
                    _say(f"  {line.rstrip()}")
    if process.returncode != 0:
        detail = "".join(lines).strip()
        raise SetupError(f"{hint}\n{detail}" if detail else hint)


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _fail(message: str) -> NoReturn:
    _say(f"error: {message}")
    raise SystemExit(ExitCode.FAILED)
