# SPDX-License-Identifier: Apache-2.0
"""Runs scripts/qualify in this process on small plans."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from b12x_overlay.qualify.cli import main

SMALL = [
    "--prefill-lengths", "64", "--prefill-repeats", "2",
    "--decode-concurrency", "2", "--decode-windows", "2", "--decode-window", "0.3", "--decode-settle", "0.05",
    "--decode-ramp", "3", "--decode-max-tokens", "100",
    "--needle-runs", "1", "--needle-requests", "12", "--needle-concurrency", "4", "--needle-records", "10",
    "--stall-timeout", "0.6", "--request-timeout", "8",
]  # fmt: skip


@dataclass
class Outcome:
    """A finished command."""

    code: int
    result: dict[str, Any]
    folder: Path
    out: str
    err: str

    def faults(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for block in self.result["blocks"]:
            for fault in block["faults"]:
                counts[fault["kind"]] = counts.get(fault["kind"], 0) + fault["count"]
        return counts

    def line(self, name: str) -> dict[str, Any]:
        return next(line for line in self.result["lines"] if line["id"] == name)

    def stops(self) -> dict[str, str]:
        return {s["cell"]: s["why"] for block in self.result["blocks"] for s in block["stopped"]}


@pytest.fixture
def qualify(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Outcome]:
    """``qualify("run", url, "--only", "decode")``: small plan, own result folder."""
    monkeypatch.setenv("B12X_OVERLAY_BUILD", str(tmp_path / "build"))

    def call(*arguments: str, out: str = "result", small: bool = True) -> Outcome:
        folder = tmp_path / out
        extra = [*SMALL] if small and arguments[0] in ("run", "ab") else []
        where = [] if arguments[0] == "report" else ["--out", str(folder)]
        code = main([arguments[0], *extra, *arguments[1:], *where])
        text = capsys.readouterr()
        path = folder / "result.json"
        result = json.loads(path.read_text()) if path.exists() else {}
        return Outcome(code, result, folder, text.out, text.err)

    return call
