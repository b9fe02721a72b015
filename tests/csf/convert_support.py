# SPDX-License-Identifier: Apache-2.0
"""What the tests of ``convert-csf`` share: running the command, and damaging files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from b12x_overlay.csf import cli, convert, files
from safetensors.torch import load_file, save_file

MAIN = "import sys; from b12x_overlay.csf import cli; sys.exit(cli.main(sys.argv[1:]))"


COMPRESSED = 2 * 2 * 3  # layers, experts, projections


def run(*arguments: object) -> int:
    return cli.main(["--quiet", *map(str, arguments)])


def files_of(root: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()
    }


def add_tensor(root: Path, name: str, tensor: torch.Tensor) -> None:
    path = sorted(root.glob("*.safetensors"))[0]
    edit_header(path, lambda tensors: tensors.update({name: tensor}))
    index = json.loads((root / "model.safetensors.index.json").read_text())
    index["weight_map"][name] = path.name
    (root / "model.safetensors.index.json").write_text(json.dumps(index))


BOOKKEEPING = ("job.json", "payload", "manifest.json", "manifest.json.tmp", "lock")


def edit_header(path: Path, edit) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, {"format": "pt"})


def first(source: Path) -> Path:
    return source / "model-00001-of-00003.safetensors"


def rewrite(source: Path, edit) -> None:
    """*edit* maps the tensors of each shard to new ones; the index follows."""
    index = {}
    for path in sorted(source.glob("*.safetensors")):
        tensors = edit(load_file(path))
        save_file(tensors, path, {"format": "pt"})
        index |= dict.fromkeys(tensors, path.name)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


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


def edit_json(path: Path, edit) -> None:
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))


def some_shard(made: Path) -> Path:
    return sorted((made / "tensors").iterdir())[0]


def interrupt_then_change(monkeypatch: pytest.MonkeyPatch, source: Path, target: Path) -> None:
    """An interrupted run, after which the source is another one."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(convert, "_convert_shard", interrupt)
        run(source, target)
    os.utime(source / "config.json", (1, 1))
