# SPDX-License-Identifier: Apache-2.0
"""The flags of a ``vllm serve`` command line that decide what is active.

Read as vLLM reads them: dashes and underscores are the same, ``--flag value`` and ``--flag=value``, dotted JSON
(``--kernel-config.moe_backend b12x``) and a flat ``--config`` file. Flags of no interest here are passed over.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from b12x_overlay.doctor.findings import Finding, Level

_SHORT = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-pcp": "prefill-context-parallel-size",
    "-dcp": "decode-context-parallel-size",
    "-ep": "enable-expert-parallel",
    "-q": "quantization",
    "-sc": "speculative-config",
    "-cc": "compilation-config",
}
_SWITCHES = {
    "enable-expert-parallel", "enforce-eager", "enable-dbo", "kv-sharing-fast-prefill", "enable-sleep-mode", "swa-bounded-replay",
}  # fmt: skip
_JSON = {"kernel-config", "speculative-config", "compilation-config"}
_INTEGERS = {
    "tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size", "prefill-context-parallel-size",
    "decode-context-parallel-size", "ubatch-size", "max-num-seqs", "max-num-batched-tokens", "offload-group-size",
}  # fmt: skip
_TEXTS = {
    "model",
    "moe-backend",
    "quantization",
    "load-format",
    "config",
    "cpu-offload-gb",
    "dtype",
    "revision",
}
_SUFFIXES = {"k": 1000, "K": 1024, "m": 10**6, "M": 2**20}


class ServeArgsError(ValueError):
    """A flag of interest cannot be read; the message names it."""


@dataclass(frozen=True)
class ServeArgs:
    """The flags of interest, with vLLM's defaults where they are not given.

    Attributes:
        given: a command line was given at all.
        draft_tokens: ``num_speculative_tokens`` of --speculative-config, 0 without.
        draft_moe_backend: ``moe_backend`` of --speculative-config, "" if it follows the target's.
        raw: name without dashes -> value, as found.
    """

    given: bool = False
    model: str = ""
    moe_backend: str = "auto"
    quantization: str = ""
    load_format: str = "auto"
    draft_tokens: int = 0
    draft_moe_backend: str = ""
    raw: dict[str, Any] = field(default_factory=dict)

    def count(self, name: str, default: int = 1) -> int:
        """An integer flag, *default* if not given."""
        return int(self.raw.get(name, default))

    def on(self, name: str) -> bool:
        """A switch."""
        return bool(self.raw.get(name, False))


def parse(command: list[str]) -> tuple[ServeArgs, list[Finding]]:
    """Read what follows ``--`` on doctor's command line: ``vllm serve MODEL --flag ...``, or only model and flags.

    A value of interest that is missing or malformed is a finding; all other flags are read as they are.
    """
    if not command:
        return ServeArgs(), []
    raw: dict[str, Any] = {}
    found: list[Finding] = []
    words = _without_program(list(command), found)
    if words and not words[0].startswith("-"):
        raw["model"] = words.pop(0)
        if words and not words[0].startswith("-"):
            _wrong(found, f"{words[0]!r} after the model {raw['model']!r} is no flag")
    _collect(words, raw, found)
    if "config" in raw:
        try:
            for name, value in _config_file(Path(raw["config"]), found).items():
                raw.setdefault(name, value)  # the command line wins
        except ServeArgsError as error:
            _wrong(found, str(error))
    kernel, draft = raw.get("kernel-config", {}), raw.get("speculative-config", {})
    backend = raw.get("moe-backend", "auto")
    if _name(backend) == "auto":
        backend = kernel.get("moe_backend", "auto")
    try:
        draft_tokens = _integer(
            "speculative-config.num_speculative_tokens",
            str(draft.get("num_speculative_tokens") or 0),
        )
    except ServeArgsError as error:
        _wrong(found, str(error))
        draft_tokens = 0
    args = ServeArgs(
        given=True,
        model=str(raw.get("model", "")),
        moe_backend=_name(backend),
        quantization=str(raw.get("quantization", "")),
        load_format=str(raw.get("load-format", "auto")),
        draft_tokens=draft_tokens,
        draft_moe_backend=_name(draft.get("moe_backend") or ""),
        raw=raw,
    )
    return args, found


def _wrong(found: list[Finding], text: str) -> None:
    found.append(Finding("flags", Level.PROBLEM, text, "correct the command line after --"))


def _without_program(words: list[str], found: list[Finding]) -> list[str]:
    """*words* without ``vllm serve`` or ``python -m vllm.…``; the image's own arguments start with the model."""
    name = Path(words[0]).name
    if name.startswith("python") and words[1:2] == ["-m"] and words[2:3] and "vllm" in words[2]:
        return words[3:]
    if name == "vllm":
        words = words[1:]
        if words and words[0] != "serve" and not words[0].startswith("-"):
            _wrong(found, f"'vllm {words[0]}' is not 'vllm serve'")
            return []
    return words[1:] if words[:1] == ["serve"] else words


def _collect(words: list[str], raw: dict[str, Any], found: list[Finding]) -> None:
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            continue  # the value of a flag that is of no interest
        key, equals, value = word.partition("=")
        name, *path = key.split(".")
        name = _SHORT.get(name, name.removeprefix("--")).replace("_", "-")
        negated = name.removeprefix("no-") in _SWITCHES and name.startswith("no-")
        if negated or name in _SWITCHES:
            raw[name.removeprefix("no-")] = not negated
            continue
        if name not in _JSON | _INTEGERS | _TEXTS:
            continue
        if not equals:
            if not words:
                _wrong(found, f"--{name} has no value")
                continue
            value = words.pop(0)
        try:
            _store(raw, name, path, value)
        except ServeArgsError as error:
            _wrong(found, str(error))


def _store(raw: dict[str, Any], name: str, path: list[str], value: str) -> None:
    if name in _INTEGERS:
        raw[name] = _integer(name, value)
    elif name not in _JSON:
        raw[name] = value
    elif path:
        inner = raw.setdefault(name, {})
        for step in path[:-1]:
            inner = inner.setdefault(step.replace("-", "_"), {})
        try:
            inner[path[-1].replace("-", "_")] = json.loads(value)
        except json.JSONDecodeError:
            inner[path[-1].replace("-", "_")] = value
    else:
        try:
            parsed = json.loads(value)
        except json.JSONDecodeError as error:
            raise ServeArgsError(f"--{name} is not JSON ({error}): {value}") from error
        if not isinstance(parsed, dict):
            raise ServeArgsError(f"--{name} is not a JSON object: {value}")
        raw.setdefault(name, {}).update(parsed)


def _integer(name: str, value: str) -> int:
    if value.strip().lower() == "auto":
        return -1
    factor = _SUFFIXES.get(value[-1:], 1)
    digits = value[:-1] if factor != 1 else value
    try:
        return int(float(digits) * factor)
    except ValueError as error:
        raise ServeArgsError(f"--{name}: {value!r} is not a number") from error


def _name(value: object) -> str:
    return str(value).lower().replace("-", "_")


def _config_file(path: Path, found: list[Finding]) -> dict[str, Any]:
    """The flat ``key: value`` lines of a YAML file; nested ones are named as not read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ServeArgsError(f"--config {path}: {error}") from error
    values: dict[str, Any] = {}
    for line in lines:
        text = line.split(" #")[0].rstrip()
        if not text or text.lstrip().startswith(("#", "---")):
            continue
        key, colon, value = text.partition(":")
        name, value = key.strip().replace("_", "-"), value.strip().strip("'\"")
        if line[0].isspace() or not colon or (name in _JSON and not value):
            note = f"{path}: nested values are not read by doctor (line {line.strip()!r})"
            found.append(
                Finding("flags", Level.WARNING, note, "give those flags on the command line")
            )
            continue
        if name in _SWITCHES:
            values[name] = value.lower() in ("true", "yes", "on", "1")
        elif name in _JSON | _INTEGERS | _TEXTS:
            _store(values, name, [], value)
    return values
