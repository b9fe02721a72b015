# SPDX-License-Identifier: Apache-2.0
"""Run one function of the tests in a process of its own, with a chosen vLLM tree, b12x and environment."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from support.paths import TESTS, pythonpath


class ChildError(AssertionError):
    """The child ended with an error; the message holds the end of its output."""


def run_child(
    function: str,
    *,
    tree: str = "patched",
    provider: str | None = "b12x-flashinfer",
    env: dict[str, str] | None = None,
    timeout: float = 300,
    **arguments: Any,
) -> Any:
    """Call ``package.module:function(**arguments)`` in a fresh interpreter and return its result.

    Arguments and result travel as JSON. A key ``"log"`` is added to a result that is a dict: everything the child
    printed, which is where vLLM's log lines are.

    Raises:
        ChildError: the function raised, or the process died or took longer than *timeout* seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "B12X_"))}
        environment.update(
            PYTHONPATH=pythonpath(tree, provider),
            PYTHONDONTWRITEBYTECODE="",
            HF_HUB_OFFLINE="1",
            VLLM_NO_USAGE_STATS="1",
            VLLM_HAS_FLASHINFER_CUBIN="1",
        )
        environment.update(env or {})
        try:
            process = subprocess.run(
                [sys.executable, "-m", "support.child", function, str(out)],
                input=json.dumps(arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                errors="replace", env=environment, cwd=TESTS, timeout=timeout, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            output = error.stdout or b""
            text = output.decode(errors="replace") if isinstance(output, bytes) else output
            raise ChildError(f"{function} took longer than {timeout} s\n{text[-4000:]}") from None
        if process.returncode != 0 or not out.exists():
            raise ChildError(
                f"{function} ended with {process.returncode}\n{process.stdout[-6000:]}"
            )
        result = json.loads(out.read_text(encoding="utf-8"))
    if isinstance(result, dict):
        result["log"] = process.stdout
    return result


def _main(target: str, out: str) -> None:
    module, _, name = target.partition(":")
    result = getattr(importlib.import_module(module), name)(**json.load(sys.stdin))
    Path(out).write_text(json.dumps(result), encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # vLLM's and b12x's exit handlers wait for things that a CPU child never had


if __name__ == "__main__":
    _main(*sys.argv[1:])
