# SPDX-License-Identifier: Apache-2.0
"""GPU and driver, through ctypes and a shared library with NVML's signatures."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from b12x_overlay.doctor import gpu
from b12x_overlay.doctor.findings import Level

Machine = Callable[..., gpu.Gpus]

PRO = "RTX PRO 6000 Blackwell Workstation Edition|GPU-aaaa|12|0|102641958912"
SPARK = "NVIDIA GB10|GPU-bbbb|12|1|0"
H200 = "NVIDIA H200|GPU-cccc|9|0|150754820096"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to make the NVML stub with")
    made = tmp_path_factory.mktemp("nvml") / "libnvml_stub.so"
    source = Path(__file__).with_name("nvml_stub.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", made, source], check=True)
    return str(made)


@pytest.fixture
def machine(library: str, monkeypatch: pytest.MonkeyPatch) -> Machine:
    def make(
        *devices: str, driver: str = "580.95.05", cuda: int = 13000, **environ: str
    ) -> gpu.Gpus:
        # The stub reads the C environment, which os.environ writes through to.
        monkeypatch.setitem(os.environ, "NVML_STUB", ";".join([driver, str(cuda), *devices]))
        return gpu.detect(environ, library)

    return make


def levels(
    gpus: gpu.Gpus, torch_cuda: str | None = "13.0", needed: bool = True, **environ: str
) -> list[Level]:
    return [finding.level for finding in gpu.findings(gpus, torch_cuda, needed, environ)]


def test_two_rtx_pro_6000(machine: Machine) -> None:
    found = machine(PRO, PRO.replace("aaaa", "dddd"))
    assert [(d.capability, d.supported, d.visible) for d in found.devices] == [
        ((12, 0), True, True)
    ] * 2
    assert (found.driver, found.cuda) == ("580.95.05", (13, 0))
    assert found.devices[0].memory_bytes == 102641958912
    assert levels(found) == [Level.OK, Level.OK, Level.OK]


def test_a_dgx_spark_has_no_memory_figure(machine: Machine) -> None:
    found = machine(SPARK, cuda=13010)
    assert (found.devices[0].supported, found.devices[0].memory_bytes) == (True, None)
    assert found.cuda == (13, 1)


def test_another_gpu_is_a_problem_only_where_one_is_needed(machine: Machine) -> None:
    found = machine(H200)
    assert levels(found)[0] is Level.PROBLEM
    assert levels(found, needed=False)[0] is Level.WARNING


@pytest.mark.parametrize(
    ("variable", "visible"),
    [
        (None, [0, 1, 2]),
        ("1", [1]),
        ("2,0", [0, 2]),
        ("GPU-bbbb", [1]),
        ("GPU-b", [1]),
        ("0,9,1", [0]),  # CUDA stops at the first entry that it does not know
        ("", []),
        ("-1", []),
        ("MIG-5c1f", [0, 1, 2]),
    ],
)
def test_cuda_visible_devices(machine: Machine, variable: str | None, visible: list[int]) -> None:
    environ = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    found = machine(PRO, SPARK, H200, **environ)
    assert [device.index for device in found.visible] == visible
    if not visible:
        assert levels(found) == [Level.PROBLEM]


@pytest.mark.parametrize(
    ("cuda", "torch_cuda", "level"),
    [
        (13000, "13.0", Level.OK),
        (13020, "13.0", Level.OK),
        (13000, "13.1", Level.NOTE),
        (12080, "13.0", Level.PROBLEM),
        (13000, None, Level.NOTE),
    ],
)
def test_driver_and_torch(
    machine: Machine, cuda: int, torch_cuda: str | None, level: Level
) -> None:
    assert levels(machine(PRO, cuda=cuda), torch_cuda)[-1] is level


def test_different_gpus_without_an_order(machine: Machine) -> None:
    found = machine(PRO, H200, CUDA_VISIBLE_DEVICES="0")
    assert Level.WARNING in levels(found, CUDA_VISIBLE_DEVICES="0")
    assert Level.WARNING not in levels(
        found, CUDA_VISIBLE_DEVICES="0", CUDA_DEVICE_ORDER="PCI_BUS_ID"
    )
    assert Level.WARNING not in levels(found, CUDA_VISIBLE_DEVICES="GPU-aaaa")


def test_no_driver_and_a_driver_that_fails(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cannot be loaded" in gpu.detect({}, "libnowhere.so.1").error
    monkeypatch.delenv("NVML_STUB", raising=False)
    failing = gpu.detect({}, library)
    assert "error 9" in failing.error
    assert levels(failing) == [Level.PROBLEM]


def test_an_assumed_gpu_has_no_driver_to_complain_about() -> None:
    assumed = gpu.Gpus((gpu.Gpu(0, "assumed", "", (12, 0), None, True),))
    assert levels(assumed) == [Level.OK]
