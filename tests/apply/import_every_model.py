#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Import every model module of the patched vLLM first, each in a process of its own; prints those that fail.

What ``test_imports.py`` shows from the sources, run for real: about 10 minutes on two cores, so no part of the tests.
Modules whose own dependencies are not installed (torchvision, for one) fail and are listed as such; exit code 1 only for a
circle of imports.

  scripts/test --run tests/apply/import_every_model.py [PART OF A NAME]
"""

from __future__ import annotations

import importlib
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import torch._dynamo  # noqa: F401 - imported once, before the forks
import transformers  # noqa: F401
from support import cpu_ops
from support.import_graph import ImportGraph
from support.paths import site

FOLDERS = ("vllm.model_executor.models.", "vllm.models.")


def failure(name: str) -> str:
    """Why *name* cannot be imported in a fork of this process, which has imported nothing of vLLM; "" if it can."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        found = ""
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            importlib.import_module(name)
        except BaseException as error:
            found = f"{type(error).__name__}: {error}"[:300]
        os.write(write, found.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(child, 0)
    return text


def main(part: str = "") -> int:
    os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"}
    cpu_ops.install()
    modules = ImportGraph(site("patched")).modules
    names = sorted(name for name in modules if name.startswith(FOLDERS) and part in name)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        failed = {
            name: why for name, why in zip(names, pool.map(failure, names), strict=True) if why
        }
    for name, why in failed.items():
        print(f"{name}: {why}")
    circles = sum("circular import" in why for why in failed.values())
    print(
        f"{len(names)} modules: {len(names) - len(failed)} imported, {len(failed)} not, {circles} of them for a circle"
    )
    return int(circles > 0)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:2]))
