# SPDX-License-Identifier: Apache-2.0
"""From parsed options to a checked plan; errors name the option."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from b12x_overlay.qualify.errors import UsageError
from b12x_overlay.qualify.options import PARTS
from b12x_overlay.qualify.settings import NeedlePlan, Plan, explain, parse_sizes

_T = TypeVar("_T", Plan, NeedlePlan)


def plan_from(options: argparse.Namespace, order: str) -> Plan:
    """The plan that the options describe.

    Raises:
        UsageError: a value out of range, an unknown part, a list that cannot be read.
    """
    parts = _parts(options)
    values: dict[str, Any] = {
        "order": order,
        "cooldown_seconds": options.cooldown,
        "prefill": None,
        "decode": None,
        "needle": None,
    }
    if "prefill" in parts:
        values["prefill"] = {
            "lengths": parse_sizes(options.prefill_lengths, "--prefill-lengths"),
            "repeats": options.prefill_repeats,
            "warmups": options.prefill_warmups,
        }
    if "decode" in parts:
        values["decode"] = {
            "concurrency": parse_sizes(options.decode_concurrency, "--decode-concurrency"),
            "windows": options.decode_windows,
            "window_seconds": options.decode_window,
            "settle_seconds": options.decode_settle,
            "ramp_seconds": options.decode_ramp,
            "max_tokens": options.decode_max_tokens,
            "temperature": options.decode_temperature,
            "ignore_eos": options.decode_ignore_eos,
        }
    if "needle" in parts:
        values["needle"] = needle_from(options).model_dump()
    return _checked(Plan, values)


def needle_from(options: argparse.Namespace) -> NeedlePlan:
    """The needle plan that the options describe. Raises `UsageError`."""
    try:
        given = options.needle_positions or ""
        positions = tuple(float(part) for part in given.split(",") if part.strip())
    except ValueError as error:
        raise UsageError(
            f"--needle-positions: {error}; wanted numbers such as 0.1,0.5,0.9"
        ) from error
    try:
        template = json.loads(options.needle_template) if options.needle_template else {}
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f'--needle-template: {error}; wanted a JSON object such as {{"enable_thinking": true}}'
        ) from error
    if positions and len(positions) != options.needle_facts:
        raise UsageError(
            f"--needle-positions has {len(positions)} places for {options.needle_facts} facts"
        )
    names = (
        "runs",
        "salt",
        "requests",
        "concurrency",
        "records",
        "facts",
        "variants",
        "near",
        "max_tokens",
        "sampling_seed",
        "temperature",
        "top_p",
        "task_seed",
    )
    values = {name: getattr(options, f"needle_{name}") for name in names}
    return _checked(
        NeedlePlan, {**values, "fact_positions": positions, "template_options": template}
    )


def variables(given: Sequence[str]) -> dict[str, str]:
    """``NAME=VALUE`` items as a mapping. Raises `UsageError`."""
    result = {}
    for item in given:
        name, sign, value = item.partition("=")
        if not sign or not name.isidentifier():
            raise UsageError(f"'{item}' is no NAME=VALUE")
        result[name] = value
    return result


def _parts(options: argparse.Namespace) -> list[str]:
    chosen = list(PARTS)
    for flag, given, keep in (("--only", options.only, True), ("--skip", options.skip, False)):
        if given is None:
            continue
        names = [part.strip() for part in given.split(",")]
        for name in names:
            if name not in PARTS:
                raise UsageError(f"{flag}: '{name}' is no part; there are {', '.join(PARTS)}")
        chosen = [part for part in chosen if (part in names) == keep]
    if not chosen:
        raise UsageError("nothing is left to measure")
    return chosen


def _checked(kind: type[_T], values: dict[str, Any]) -> _T:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        prefix = "needle." if kind is NeedlePlan else ""
        raise UsageError(explain(error, lambda where: _flag(prefix + where))) from error


_FLAGS = {
    "decode.window_seconds": "--decode-window",
    "decode.settle_seconds": "--decode-settle",
    "decode.ramp_seconds": "--decode-ramp",
    "needle.fact_positions": "--needle-positions",
    "needle.template_options": "--needle-template",
    "cooldown_seconds": "--cooldown",
}


def _flag(where: str) -> str:
    """The option that sets a value of the plan."""
    name = ".".join(part for part in where.split(".") if not part.isdigit())
    return _FLAGS.get(name) or "--" + name.replace(".", "-").replace("_", "-")
