# SPDX-License-Identifier: Apache-2.0
"""A small vLLM engine on CPU: compressed scales give the logits of plain ones, bit for bit, in every way to serve them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from csf import checkpoints, checkpoints_csf
from support.child import run_child

CSF = {"quantization": "nvfp4_csf", "load_format": "nvfp4_csf"}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> SimpleNamespace:
    """Two checkpoints of one architecture, each in every form."""
    root = tmp_path_factory.mktemp("engine")
    result: dict[str, Any] = {}
    for name, seed in (("", 0), ("other_", 7)):
        source = root / f"{name}source"
        checkpoints.write(source, mtp_layer=False, seed=seed)
        box = checkpoints_csf.container(source, root / f"{name}csf")
        result |= {
            f"{name}source": source,
            f"{name}serve": checkpoints_csf.serving(box, root / f"{name}serve"),
            f"{name}index": checkpoints_csf.index_layout(box, root / f"{name}index"),
        }
    return SimpleNamespace(**{key: str(path) for key, path in result.items()})


@pytest.fixture(scope="module")
def served(made) -> dict[str, Any]:
    """What every way to serve them gave, W4A16."""
    ways = {
        "plain": {"model": made.source},
        "compress": {"model": made.source, "compress": True, "reload": made.other_source},
        "container": {"model": made.serve, **CSF, "reload": made.other_serve},
        "index": {"model": made.index, "load_format": "nvfp4_csf", "prefetch": False},
        "other": {"model": made.other_source},
    }
    return run_child("csf.engine_cases:serve_all", ways=ways)


@pytest.mark.parametrize("way", ["compress", "container", "index"])
def test_logits_are_those_of_plain_scales(served, way: str) -> None:
    assert served[way]["logits"] == served["plain"]["logits"]
    assert served["other"]["logits"] != served["plain"]["logits"]


@pytest.mark.parametrize("way", ["compress", "container", "index"])
def test_all_layers_read_one_scratch(served, way: str) -> None:
    addresses = served[way]["scale_addresses"]
    assert len(addresses) == 2
    assert addresses[0] == addresses[1] == served[way]["parameter_addresses"][0]


def test_upstreams_name_checks_get_the_sources_answers(served) -> None:
    plain = served["plain"]
    for way in ("compress", "container"):
        for key in ("quantization", "config_name", "config_class", "is_nvfp4"):
            assert served[way][key] == plain[key], (way, key)
    index = served["index"]
    assert (index["quantization"], index["config_name"], index["is_nvfp4"]) == (
        "modelopt_mixed",
        "modelopt_mixed",
        True,
    )


def test_prefetch_runs_in_steps_with_prefill_rows_and_leaves_nothing_behind(served) -> None:
    assert served["container"]["prefetched"] == served["compress"]["prefetched"] > 0
    assert served["index"]["prefetched"] == 0
    assert not any(served[way]["pending"] for way in ("container", "compress", "index"))


def test_methods(served) -> None:
    assert served["plain"]["methods"] == ["ModelOptNvFp4FusedMoE"] * 2
    assert served["compress"]["methods"] == ["CsfCompressingModelOptNvFp4FusedMoE"] * 2
    assert served["container"]["methods"] == ["CsfStreamsModelOptNvFp4FusedMoE"] * 2


@pytest.mark.parametrize("way", ["compress", "container"])
def test_reload_serves_the_new_weights_from_the_old_addresses(served, way: str) -> None:
    assert served[way]["reloaded_logits"] == served["other"]["logits"]
    assert served[way]["same_addresses"]


def test_sizes_are_reported(served) -> None:
    lines = [
        line
        for line in served["log"].splitlines()
        if "NVFP4-CSF: block scales of 2 MoE layers" in line
    ]
    assert len(lines) == 3


def test_logits_with_a4_prefill_are_those_of_plain_scales(made) -> None:
    ways = {
        "plain": {"model": made.source},
        "compress": {"model": made.source, "compress": True},
        "container": {"model": made.serve, **CSF},
    }
    served = run_child("csf.engine_cases:serve_all", ways=ways, arm=True)
    assert (
        served["compress"]["logits"] == served["plain"]["logits"] == served["container"]["logits"]
    )
    assert "2 of 2 MoE layers armed" in served["log"]


def test_starts_that_would_misread_are_refused(made) -> None:
    starts = [
        {"model": made.serve},
        {"model": made.source, **CSF},
        {"model": made.source, "load_format": "nvfp4_csf"},
    ]
    without_format, on_ordinary, format_alone = run_child(
        "csf.engine_cases:refusals", starts=starts
    )
    assert "load format 'auto' cannot read it: add --load-format nvfp4_csf" in without_format
    assert "needs a CSF checkpoint and this is an ordinary one" in on_ordinary
    assert "needs a CSF checkpoint and this is an ordinary one" in format_alone


def test_requests_that_a_running_server_refuses_lose_nothing(made) -> None:
    """A reload from another kind of folder, sleep level 2, saving: an error, and the server goes on as before."""
    folders = [made.other_source, str(Path(made.other_source).parent / "other_csf"), "/nowhere"]
    found = run_child("csf.engine_cases:refused_requests", model=made.serve, folders=folders)
    messages = found["messages"]
    ordinary, container, nowhere = (messages[folder] for folder in folders)
    assert "is an ordinary one" in ordinary
    assert "this is a container" in container
    assert "no folder on this machine" in nowhere
    assert "use sleep level 1" in messages["sleep"]
    assert not found["paused"]
    assert "cannot be saved" in messages["state"]
    assert len(found["logits"]) == 5
    assert len(set(found["logits"])) == 1


def test_stock_vllm_does_not_take_a_container(made) -> None:
    """Without the patch the name is unknown; nothing is misread."""
    path = Path(made.serve)
    message = run_child("csf.engine_cases:stock_refusal", model=str(path), tree="stock")
    assert "nvfp4_csf" in message
