# SPDX-License-Identifier: Apache-2.0
"""The GPUs and the driver, asked through NVML with ctypes: no CUDA context, no nvidia-smi, no torch."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass

from b12x_overlay.doctor.findings import Finding, Level

SUPPORTED = ((12, 0), (12, 1))
"""Compute capabilities with b12x kernels: SM120 (RTX PRO 6000, RTX 50) and SM121 (DGX Spark's GB10)."""

_LIBRARY = "libnvidia-ml.so.1"
_NAME_BYTES = 96  # NVML_DEVICE_NAME_V2_BUFFER_SIZE, also enough for a UUID and a driver version


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        index: NVML's index, in PCI bus order.
        capability: (major, minor).
        memory_bytes: None where NVML has no figure (GB10's unified memory).
        visible: not hidden by CUDA_VISIBLE_DEVICES.
    """

    index: int
    name: str
    uuid: str
    capability: tuple[int, int]
    memory_bytes: int | None
    visible: bool

    @property
    def supported(self) -> bool:
        """The b12x kernels run on it."""
        return self.capability in SUPPORTED


@dataclass(frozen=True)
class Gpus:
    """What NVML says.

    Attributes:
        driver: e.g. "580.95.05"; None without a driver.
        cuda: newest CUDA that the driver runs, (13, 0); None if unknown.
        error: why nothing could be read, empty if it could.
    """

    devices: tuple[Gpu, ...] = ()
    driver: str | None = None
    cuda: tuple[int, int] | None = None
    error: str = ""

    @property
    def visible(self) -> tuple[Gpu, ...]:
        return tuple(device for device in self.devices if device.visible)


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def detect(environ: Mapping[str, str] | None = None, library: str = _LIBRARY) -> Gpus:
    """Ask NVML. A machine without a driver gives an empty result with ``error`` set, never an exception."""
    try:
        nvml = ctypes.CDLL(library)
        status = nvml.nvmlInit_v2()
    except (OSError, AttributeError):
        return Gpus(error=f"no NVIDIA driver here: {library} cannot be loaded")
    if status != 0:
        return Gpus(
            error=f"NVML answers error {status}: driver and library differ, or no GPU is passed through"
        )
    try:
        return _read(nvml, os.environ if environ is None else environ)
    except AttributeError as error:  # a function that a very old library lacks
        return Gpus(error=f"the NVIDIA driver is too old: {error}")
    finally:
        nvml.nvmlShutdown()


def findings(
    gpus: Gpus, torch_cuda: str | None, needed: bool, environ: Mapping[str, str]
) -> list[Finding]:
    """What to tell: *needed* is whether something that was asked for runs on the GPU."""
    missing = Level.PROBLEM if needed else Level.WARNING
    if gpus.error:
        return [
            Finding(
                "gpu", missing, gpus.error, "run on the GPU machine; in a container: --gpus all"
            )
        ]
    if not gpus.visible:
        text = "no GPU is visible" + (" (CUDA_VISIBLE_DEVICES hides all)" if gpus.devices else "")
        return [
            Finding("gpu", missing, text, "in a container: --gpus all; check CUDA_VISIBLE_DEVICES")
        ]
    found = []
    for device in gpus.visible:
        sm = f"SM{device.capability[0]}{device.capability[1]}"
        if device.supported:
            found.append(Finding("gpu", Level.OK, f"GPU {device.index}: {device.name}, {sm}"))
        else:
            text = f"GPU {device.index}: {device.name} is {sm}; b12x kernels run on SM120 and SM121 only"
            fix = "use an RTX PRO 6000 Blackwell, another SM120 card or a DGX Spark"
            found.append(Finding("gpu", missing, text, fix))
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if (
        len({device.name for device in gpus.devices}) > 1
        and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
    ):
        text = "GPUs of different kinds: CUDA numbers them by speed, not as listed here"
        if chosen is None or any(part.strip().isdigit() for part in chosen.split(",")):
            found.append(Finding("gpu", Level.WARNING, text, "set CUDA_DEVICE_ORDER=PCI_BUS_ID"))
    found += _driver_findings(gpus, torch_cuda)
    return found


def _driver_findings(gpus: Gpus, torch_cuda: str | None) -> list[Finding]:
    if gpus.driver is None and gpus.cuda is None:
        return []  # an assumed GPU
    if gpus.cuda is None:
        return [Finding("gpu", Level.WARNING, "the driver does not say which CUDA it supports")]
    has = f"driver {gpus.driver} runs CUDA up to {gpus.cuda[0]}.{gpus.cuda[1]}"
    if torch_cuda is None:
        return [Finding("gpu", Level.NOTE, f"{has}; no CUDA build of torch found")]
    wanted = tuple(int(part) for part in torch_cuda.split(".")[:2])
    if gpus.cuda[0] < wanted[0]:
        fix = f"update the driver (CUDA {wanted[0]} needs one of its own generation; for CUDA 13: 580 or newer)"
        return [Finding("gpu", Level.PROBLEM, f"{has}, torch is built for {torch_cuda}", fix)]
    if gpus.cuda < wanted:
        text = f"{has}, torch is built for {torch_cuda}: works by minor-version compatibility, JIT compilers may not"
        return [Finding("gpu", Level.NOTE, text, "if kernels fail to load: update the driver")]
    return [Finding("gpu", Level.OK, f"{has}; torch is built for {torch_cuda}")]


def _read(nvml: ctypes.CDLL, environ: Mapping[str, str]) -> Gpus:
    version = ctypes.c_int()
    cuda = None
    if nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(version)) == 0:
        cuda = (version.value // 1000, version.value % 1000 // 10)
    driver = _string(nvml.nvmlSystemGetDriverVersion)
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return Gpus((), driver, cuda, "NVML cannot count the GPUs")
    found = []
    for index in range(count.value):
        handle = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
            continue  # no permission for this one: it is not ours
        major, minor = ctypes.c_int(), ctypes.c_int()
        if (
            nvml.nvmlDeviceGetCudaComputeCapability(
                handle, ctypes.byref(major), ctypes.byref(minor)
            )
            != 0
        ):
            continue
        memory = _Memory()
        known = nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
        name, uuid = (
            _string(nvml.nvmlDeviceGetName, handle),
            _string(nvml.nvmlDeviceGetUUID, handle),
        )
        capability = (major.value, minor.value)
        found.append(
            Gpu(
                index,
                name or "unnamed",
                uuid or "",
                capability,
                memory.total if known else None,
                True,
            )
        )
    return Gpus(_mark_visible(found, environ.get("CUDA_VISIBLE_DEVICES")), driver, cuda)


def _mark_visible(devices: list[Gpu], variable: str | None) -> tuple[Gpu, ...]:
    """Apply CUDA_VISIBLE_DEVICES: indices or UUID prefixes; CUDA stops at the first entry that it does not know."""
    if variable is None:
        return tuple(devices)
    shown: set[int] = set()
    for entry in (part.strip() for part in variable.split(",")):
        hits = [
            d.index
            for d in devices
            if entry and (str(d.index) == entry or d.uuid.startswith(entry))
        ]
        if entry.startswith("MIG-"):  # a slice's UUID does not name its GPU
            hits = [d.index for d in devices]
        if not hits:
            break
        shown.update(hits)
    return tuple(
        Gpu(d.index, d.name, d.uuid, d.capability, d.memory_bytes, d.index in shown)
        for d in devices
    )


def _string(function: ctypes._NamedFuncPointer, *handle: ctypes.c_void_p) -> str | None:
    buffer = ctypes.create_string_buffer(_NAME_BYTES)
    if function(*handle, buffer, ctypes.c_uint(_NAME_BYTES)) != 0:
        return None
    return buffer.value.decode(errors="replace")
