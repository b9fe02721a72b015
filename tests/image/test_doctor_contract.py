# SPDX-License-Identifier: Apache-2.0
"""The doctor repeats rules that the overlay decides by: here both are asked the same questions."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from b12x_overlay.doctor import settings
from b12x_overlay.doctor.calibration import judge
from support.child import run_child

A4 = "vllm.model_executor.layers.fused_moe.b12x_a4"
CSF = "vllm.model_executor.layers.quantization.nvfp4_csf"
SPECIAL = (
    0.0,
    -0.0,
    -1.0,
    1.0,
    math.nan,
    math.inf,
    -math.inf,
    1e-45,
    1e-39,
    2.9e-39,
    3e-39,
    3.4e38,
)
TEXTS = (
    "", " ", "0", "1", "-1", "+1", "2", "1536", " 1536 ", "9" * 5000, "-" + "9" * 5000, "1.5k", "1.0", "true", "True", "yes", "on", "off", "no",
    "false", "0x1", "1_000", "\u0661", "None",
)  # fmt: skip


def module(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not part of the patch set yet")


def test_calibrated_means_the_same() -> None:
    check = module(f"{A4}.scales").check_input_scales
    generator = random.Random(0)
    seen = set()
    for _ in range(400):
        experts = generator.randint(1, 6)
        values = [generator.uniform(1e-4, 0.5) for _ in range(3 * experts)]
        if generator.random() < 0.8:
            values[generator.randrange(len(values))] = generator.choice(SPECIAL)
        tensor = torch.tensor(values, dtype=torch.float32).reshape(3, experts)
        ours = judge(
            experts,
            {
                half: dict(enumerate(row.tolist()))
                for half, row in zip(("gate", "up", "down"), tensor, strict=True)
            },
        )
        theirs = check(tensor[:2].T.contiguous(), tensor[2])
        assert ours.calibrated == theirs.calibrated, (values, ours, theirs)
        seen.add(ours.calibrated)
    assert seen == {True, False}


@pytest.mark.parametrize("text", TEXTS)
def test_a4_switches_mean_the_same(text: str) -> None:
    parse = module(f"{A4}.settings").parse_settings
    for name, attribute, ours in (
        (settings.ARM, "enabled", "arm"),
        (settings.EAGER, "eager", "eager"),
        (settings.KEEP_PACKED, "keep_packed", "keep_packed"),
    ):
        environ = {settings.ARM: "1", name: text}
        assert getattr(settings.read(environ)[0], ours) == getattr(parse(environ), attribute), name


@pytest.mark.parametrize("text", TEXTS)
def test_csf_switches_mean_the_same(text: str) -> None:
    parse = module(f"{CSF}.settings").parse_settings
    for name, attribute in (
        (settings.COMPRESS, "compress"),
        (settings.PREFETCH, "prefetch"),
        (settings.RAISE_MAIN_STREAM, "raise_main_stream"),
    ):
        environ = {name: text}
        assert getattr(settings.read(environ)[0], attribute) == getattr(parse(environ), attribute)


@pytest.mark.parametrize("provider", ["b12x-flashinfer", "b12x-pypi"])
def test_a_provider_can_do_what_the_server_finds(provider: str) -> None:
    module(f"{A4}.provider")
    found = run_child("image.test_doctor_contract:ask_provider", provider=provider)
    assert found["ours"] == found["theirs"], found


def ask_provider() -> dict[str, Any]:
    """In a process with one provider: how the server would use it, and how the doctor says it would."""
    from b12x_overlay.doctor import provider
    from support import sm120

    sm120.install()
    import importlib

    abilities = provider.detect().abilities
    ours = "bind" if abilities.a4_prefill else "dual" if abilities.dual_plan else None
    return {"ours": ours, "theirs": importlib.import_module(f"{A4}.provider").get_provider().kind}
