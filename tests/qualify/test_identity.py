# SPDX-License-Identifier: Apache-2.0
"""What is recorded of a server: from this repository's own manifest and doctor, and nothing that names a machine."""

from __future__ import annotations

import json

import pytest
from b12x_overlay.doctor.cli import main as doctor
from b12x_overlay.image import content, manifest
from b12x_overlay.paths import OVERLAY
from b12x_overlay.qualify import promises
from b12x_overlay.qualify.documents import take
from b12x_overlay.qualify.schema import Identity
from qualify.fake_server import serving
from support.paths import site

FOUND = {
    "python": "3.12.1",
    "vllm": {"version": "0.33.0", "folder": "/usr/local/lib/python3.12/dist-packages/vllm"},
    "packages": {"torch": "2.14.0", "b12x": None},
    "torch_cuda": "13.0",
    "b12x": {"provider": "flashinfer", "version": "0.7.2.post1", "clash": False, "label": "flashinfer 0.7.2.post1"},
    "record": {"path": "/usr/local/lib/x/RECORD", "sha256": "00"},
}  # fmt: skip


@pytest.fixture
def image_manifest(tmp_path):
    """A manifest as the image build composes it, of this repository's patch set."""
    inputs = content.inputs(
        content.Base("registry.lan:5000/vllm/vllm-openai:v0.33.0", "sha256:ab"), "x86_64"
    )
    path = tmp_path / "manifest.json"
    path.write_bytes(manifest.compose(inputs, content.content_id(inputs), FOUND, []))
    return path


def test_the_images_manifest_is_in_the_result(qualify, image_manifest):
    document = json.loads(image_manifest.read_text())
    with serving() as server:
        done = qualify("run", server.url, "--only", "prefill", "--identity", str(image_manifest))
    identity = done.result["arms"][0]["identity"]
    assert identity["manifest"]["content_id"] == document["content_id"]
    assert identity["manifest"]["patchset"] == document["inputs"]["patchset"]["patchset"]
    assert identity["manifest"]["patches"] == [
        p["name"] for p in document["inputs"]["patchset"]["patches"]
    ]
    assert identity["manifest"]["base"] == "vllm/vllm-openai:v0.33.0"
    assert identity["versions"]["torch"] == "2.14.0"
    assert "b12x-overlay-image/1" in identity["sources"]
    text = (done.folder / "result.json").read_text()
    assert "registry.lan" not in text
    assert "dist-packages" not in text


def test_a_doctor_report_is_in_the_result(qualify, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("B12X_W4A16_A4_PREFILL_MIN_TOKENS", "1536")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnop")
    doctor(["--json"])
    path = tmp_path / "doctor.json"
    path.write_text(capsys.readouterr().out)
    with serving() as server:
        done = qualify("run", server.url, "--only", "prefill", "--identity", str(path))
    identity = done.result["arms"][0]["identity"]
    assert identity["environment"] == {"B12X_W4A16_A4_PREFILL_MIN_TOKENS": "1536"}
    assert identity["manifest"]["architecture"] == json.loads(path.read_text())["machine"]
    assert "hf_" not in (done.folder / "result.json").read_text()


def test_gpus_and_active_features_of_a_doctor_report():
    identity = Identity(model="m")
    take(
        identity,
        {
            "schema": "b12x-overlay-doctor/1",
            "gpu": {"driver": "590.1", "cuda": "13.4", "devices": [{"name": "NVIDIA RTX PRO 6000 (UUID: GPU-12)", "uuid": "GPU-12"}]},
            "features": [{"name": "A4 prefill", "active": True}, {"name": "NVFP4-CSF", "active": None}],
            "vllm": {"state": "patched", "patchset": "0123", "folder": "/home/bob/vllm"},
            "settings": {"HOME": "/home/bob", "VLLM_B12X_CSF_COMPRESS": "/home/bob"},
        },
    )  # fmt: skip
    assert identity.gpus == ["NVIDIA RTX PRO 6000"]
    assert identity.manifest["active"] == ["A4 prefill"]
    assert identity.environment == {"VLLM_B12X_CSF_COMPRESS": "<set>"}
    assert "bob" not in identity.model_dump_json()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "has schema None"),
        ('{"schema": "x/1"}', "has schema 'x/1'"),
        (None, "cannot read"),
    ],
)
def test_a_wrong_identity_file(qualify, tmp_path, text, message):
    path = tmp_path / "identity.json"
    if text is not None:
        path.write_text(text)
    with serving() as server:
        done = qualify("run", server.url, "--identity", str(path))
        assert server.seen.paths == []
    assert done.code == 2
    assert message in done.err
    assert not done.folder.exists()


def test_log_lines_and_counter_names_are_the_overlays():
    """The other side of this interface is the patched vLLM's own source."""
    folder = OVERLAY / "vllm/model_executor/layers/fused_moe/b12x_a4"
    counters, report = ((folder / name).read_text() for name in ("counters.py", "report.py"))
    for name in (promises.A4_ROWS, promises.A4_MISSED_ROWS):
        assert f'"{name.removesuffix("_total")}"' in counters
    assert "First A4 prefill call: %s runs" in counters
    assert "MoE layers armed. " in report
    assert promises.read_log("INFO x First A4 prefill call: layer.0 runs 5 of 7 rows") == "active"
    assert promises.read_log("A4 prefill: 45 of 46 MoE layers armed. b12x is ...") == "armed"
    assert (
        promises.read_log("A4 prefill: draft model: none of 1 MoE layers armed; every row") == "off"
    )
    assert promises.read_log("") == "off"


@pytest.mark.parametrize(
    ("today", "state"),
    [
        ("A4 prefill: none of 2 MoE layers armed; every row", "off"),
        ("A4 prefill: 2 of 2 MoE layers armed.", "armed"),
        ("nothing about it", "off"),
        ("First A4 prefill call: layer.0 runs 5 of 7 rows", "active"),
    ],
)
def test_only_the_last_start_in_a_log_counts(today, state):
    """Logs are appended to; the line is vLLM's own."""
    start = "Initializing a V1 LLM engine (v0.33.0) with config: model='m'"
    core = (site("stock") / "vllm/v1/engine/core.py").read_text()
    assert "Initializing a V1 LLM engine (v%s)" in core
    yesterday = (
        "A4 prefill: 2 of 2 MoE layers armed.\nFirst A4 prefill call: layer.0 runs 5 of 7 rows"
    )
    assert promises.read_log("\n".join([start, yesterday, start, today])) == state


def test_the_servers_log_says_whether_a4_is_active(qualify, tmp_path):
    log = tmp_path / "server.log"
    log.write_text(
        "A4 prefill: 45 of 46 MoE layers armed.\nFirst A4 prefill call: layers.0 runs 5 of 7 rows\n"
    )
    with serving() as server:
        done = qualify("run", server.url, "--only", "prefill", "--server-log", str(log))
    assert done.line("a4.active")["value"] == 1.0
    assert done.line("a4.active")["basis"] == "the server's log"
    log.write_text("A4 prefill: 45 of 46 MoE layers armed.\n")
    with serving() as server:
        done = qualify(
            "run", server.url, "--only", "prefill", "--server-log", str(log), out="armed"
        )
    assert done.line("a4.active")["value"] == 0.0
    assert done.line("a4.active")["note"] == "armed, but no A4 call logged"


def test_a_server_without_the_counter_is_not_called_inactive_because_another_has_it(qualify):
    """The other one may only have been started without the folder that puts the counters into /metrics."""
    with serving(a4_rows=None) as a, serving(a4_rows=True) as b:
        done = qualify("ab", a.url, b.url, "--question", "a4", "--only", "prefill")
    assert (done.line("a.a4.active")["value"], done.line("a.a4.active")["verdict"]) == (
        None,
        "missing",
    )
    assert done.line("b.a4.active")["value"] == 1.0
