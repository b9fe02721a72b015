# SPDX-License-Identifier: Apache-2.0
"""Puts the parts together: examine this machine, this environment, these flags and this checkpoint."""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from b12x_overlay.doctor import (
    checkpoint,
    features,
    gpu,
    packages,
    provider,
    serveargs,
    settings,
    table,
)
from b12x_overlay.doctor.checkpoint import Checkpoint
from b12x_overlay.doctor.findings import Feature, Finding, Level
from b12x_overlay.doctor.gpu import Gpus
from b12x_overlay.doctor.provider import Provider
from b12x_overlay.doctor.safetensors import CheckpointError
from b12x_overlay.doctor.serveargs import ServeArgs
from b12x_overlay.image import integrity
from b12x_overlay.image.expected import Expected
from b12x_overlay.image.integrity import State

SCHEMA = "b12x-overlay-doctor/1"


@dataclass(frozen=True)
class Question:
    """What the user gave: a ``vllm serve`` line, a checkpoint, a GPU to assume instead of the ones here."""

    command: tuple[str, ...] = ()
    checkpoint: str = ""
    assumed_gpu: tuple[int, int] | None = None


@dataclass(frozen=True)
class Report:
    """Everything found; :meth:`works` is what the exit code says."""

    findings: tuple[Finding, ...]
    features: tuple[Feature, ...]
    versions: dict[str, str | None]
    vllm: integrity.Verdict
    provider: Provider
    gpus: Gpus
    checkpoint: Checkpoint | None
    given: dict[str, str]

    @property
    def works(self) -> bool:
        """Nothing is broken, and everything that was asked for will be active."""
        return not self.problems and not any(
            feature.asked and feature.active is not True for feature in self.features
        )

    @property
    def problems(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level is Level.PROBLEM]

    def as_json(self) -> dict[str, Any]:
        """The ``--json`` document."""
        return {
            "schema": SCHEMA,
            "works": self.works,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "versions": self.versions,
            "vllm": {
                "state": self.vllm.state.value,
                "folder": _text(self.vllm.folder),
                "patchset": self.vllm.patchset,
            },
            "b12x": {
                "provider": self.provider.name,
                "version": self.provider.version,
                "origin": _text(self.provider.origin),
                "owners": list(self.provider.owners),
                "clash": self.provider.clash,
                "abilities": asdict(self.provider.abilities),
            },
            "gpu": {
                "driver": self.gpus.driver,
                "cuda": _dotted(self.gpus.cuda),
                "error": self.gpus.error,
                "devices": [
                    {**asdict(device), "capability": _dotted(device.capability)}
                    for device in self.gpus.devices
                ],
            },
            "settings": self.given,
            "checkpoint": _checkpoint_json(self.checkpoint),
            "features": [
                {**asdict(feature), "ok": not feature.asked or feature.active}
                for feature in self.features
            ],
            "findings": [asdict(finding) for finding in self.findings],
        }


def examine(
    question: Question,
    expected: Expected,
    environ: Mapping[str, str],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Examine everything; raises nothing for what is merely wrong, that becomes findings."""
    found: list[Finding] = []
    switches, more = settings.read(environ, settings.registered_in_vllm())
    found += more
    serve, more = serveargs.parse(list(question.command))
    found += more
    vllm = integrity.quick(expected)
    found += _vllm_findings(vllm, expected)
    pins = packages.exact_pins(installed) if (installed := packages.find("vllm")) else {}
    given = provider.detect()
    found += provider.findings(given, pins.get(provider.FLASHINFER))
    found += _pin_findings(pins)
    read = _checkpoint(question, serve, environ, found, progress)
    gpus = _assumed(question) or gpu.detect(environ)
    known = [device.supported for device in gpus.visible]
    patched = None if vllm.state is State.ABSENT else vllm.state is State.PATCHED
    seen = features.Seen(switches, serve, read, given, patched, all(known) if known else None)
    found += gpu.findings(gpus, packages.torch_cuda(), features.wants_gpu(seen), environ)
    rows = tuple(table.evaluate(seen))
    return Report(tuple(found), rows, packages.versions(), vllm, given, gpus, read, switches.given)


def _checkpoint(
    question: Question,
    serve: ServeArgs,
    environ: Mapping[str, str],
    found: list[Finding],
    progress: Callable[[int, int], None],
) -> Checkpoint | None:
    model = question.checkpoint or serve.model
    if not model:
        return None
    try:
        folder = checkpoint.locate(model, environ, str(serve.raw.get("revision", "main")))
        read = checkpoint.read(folder, progress)
    except CheckpointError as error:
        # A model that is merely not downloaded yet is no fault of what is here.
        level = Level.PROBLEM if question.checkpoint or "/" not in model else Level.WARNING
        found.append(Finding("checkpoint", level, str(error)))
        return None
    found += [_checkpoint_finding(read), *_mismatch_findings(read)]
    return read


def _checkpoint_finding(read: Checkpoint) -> Finding:
    target = [layer for layer in read.layers if not layer.draft]
    calibrated = sum(layer.calibration.calibrated for layer in target)
    method = (
        " ".join(part for part in (read.quant.method, read.quant.algo) if part) or "no quantization"
    )
    scales = ", scales as NVFP4-CSF" if read.csf else ""
    text = f"{read.folder}: {method}{scales}; {len(target)} expert layers, {calibrated} calibrated"
    drafts = len(read.layers) - len(target)
    return Finding("checkpoint", Level.OK, text + (f"; {drafts} draft" if drafts else ""))


def _mismatch_findings(read: Checkpoint) -> list[Finding]:
    unequal = [layer for layer in read.layers if layer.gate_up[0]]
    if not unequal:
        return []
    experts, ratio = (
        sum(layer.gate_up[0] for layer in unequal),
        max(layer.gate_up[1] for layer in unequal),
    )
    text = (
        f"gate and up weight global scales differ in {experts} experts of {len(unequal)} layers, by up to a factor of "
        f"{ratio:.3g}: vLLM takes the gate's for both, so the up projection comes out wrong there"
    )
    return [
        Finding(
            "checkpoint",
            Level.WARNING,
            text,
            "export it again with equal weight_scale_2 of gate and up",
        )
    ]


def _vllm_findings(verdict: integrity.Verdict, expected: Expected) -> list[Finding]:
    where = f" in {verdict.folder}" if verdict.folder else ""
    if verdict.state is State.PATCHED:
        return [
            Finding(
                "vllm",
                Level.OK,
                f"vllm {verdict.version} with patch set {expected.patchset}{where}",
            )
        ]
    if verdict.state is State.STOCK:
        fix = "run the beta image, or scripts/apply-patches --target installed"
        return [
            Finding(
                "vllm",
                Level.WARNING,
                f"stock vllm {verdict.version}{where}: no patch set in it",
                fix,
            )
        ]
    if verdict.state is State.ABSENT:
        command = f"/path/to/python {shlex.quote(sys.argv[0])}"
        fix = f"run doctor with the Python that runs vllm: {command}"
        return [Finding("vllm", Level.PROBLEM, f"no vllm is installed for {sys.executable}", fix)]
    if verdict.state is State.OTHER_VERSION:
        text = f"vllm {verdict.version}{where}; the patch set is for {expected.version}"
        return [Finding("vllm", Level.PROBLEM, text, f"install vllm=={expected.version}")]
    first = verdict.faults[0]
    text = f"vllm {verdict.version}{where} is neither stock nor this patch set: {first.path} is {first.what}"
    more = f" and {len(verdict.faults) - 1} more" if len(verdict.faults) > 1 else ""
    return [
        Finding(
            "vllm",
            Level.PROBLEM,
            text + more,
            "list them with verify; then install again from a clean base",
        )
    ]


def _pin_findings(pins: dict[str, str]) -> list[Finding]:
    """Packages that vllm pins exactly and that are missing or differ; flashinfer's version is the provider's line."""
    found = []
    for name in ("torch", "nvidia-cutlass-dsl", provider.FLASHINFER):
        installed, wanted = packages.find(name), pins.get(name)
        if wanted is None:
            continue
        fix = f"pip install {name}=={wanted}"
        if installed is None:
            found.append(
                Finding(
                    "packages", Level.PROBLEM, f"vllm needs {name} {wanted}, none is installed", fix
                )
            )
        elif installed.version.split("+")[0] != wanted and name != provider.FLASHINFER:
            text = f"{name} is {installed.version}, vllm was built for {wanted}"
            found.append(Finding("packages", Level.WARNING, text, fix))
    return found


def _assumed(question: Question) -> Gpus | None:
    if question.assumed_gpu is None:
        return None
    name = "assumed with --assume-gpu"
    return Gpus((gpu.Gpu(0, name, "", question.assumed_gpu, None, True),))


def _checkpoint_json(read: Checkpoint | None) -> dict[str, Any] | None:
    if read is None:
        return None
    return {
        "folder": str(read.folder),
        "method": read.quant.method,
        "algo": read.quant.algo,
        "csf": read.quant.csf or ("streams" if read.csf else ""),
        "layers": [
            {**asdict(replace(layer)), "calibration": asdict(layer.calibration)}
            for layer in read.layers
        ],
    }


def _dotted(version: tuple[int, int] | None) -> str | None:
    return f"{version[0]}.{version[1]}" if version else None


def _text(value: object) -> str | None:
    return None if value is None else str(value)
