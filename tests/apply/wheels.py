# SPDX-License-Identifier: Apache-2.0
"""Small vLLM wheels for the wheel target's tests."""

from __future__ import annotations

import zipfile
from pathlib import Path

from apply.factory import VERSION
from b12x_overlay.patching import record
from b12x_overlay.patching.entry import Entry

TAG = "cp38-abi3-manylinux_2_28_x86_64"
STAMP = (2026, 11, 1, 9, 25, 0)


def wheel(
    folder: Path,
    files: dict[str, bytes],
    *,
    version: str = VERSION,
    executable: tuple[str, ...] = (),
) -> Path:
    """A small vLLM wheel, stored members and a data descriptor among them, as real ones have."""
    info = f"vllm-{version}.dist-info"
    rows = {
        "vllm/__init__.py": b"", **files, "vllm/tool.sh": b"#!/bin/sh\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\nSummary: Version: {version}\n\ntext\n".encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: false\nTag: {TAG}\n".encode(),
        f"{info}/licenses/LICENSE": b"L\n", f"{info}/top_level.txt": b"vllm\n",
    }  # fmt: skip
    listing = (
        record.update(b"", {path: Entry(data) for path, data in rows.items()})
        + f"{info}/RECORD,,\n".encode()
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"vllm-{version}-{TAG}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**rows, f"{info}/RECORD": listing}.items():
            member = zipfile.ZipInfo(name, STAMP)
            member.external_attr = (
                0o100755 if name == "vllm/tool.sh" or name in executable else 0o100644
            ) << 16
            member.compress_type = (
                zipfile.ZIP_STORED if name.endswith("LICENSE") else zipfile.ZIP_DEFLATED
            )
            if name == "vllm/tool.sh":
                with archive.open(
                    member, "w", force_zip64=True
                ) as stream:  # written as a stream: other headers
                    stream.write(data)
            else:
                archive.writestr(member, data)
    return path
