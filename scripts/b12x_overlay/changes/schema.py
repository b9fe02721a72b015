# SPDX-License-Identifier: Apache-2.0
"""Checks one fragment against fragment.schema.json and says in plain words what is wrong and how to fix it."""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend

from b12x_overlay.changes.model import FIELDS, NO_ACTION, SCHEMA, SECTIONS, Fault, Fragment, plain

SCHEMA_FILE = Path(__file__).with_name("fragment.schema.json")

_JSON_TYPES = {
    bool: "true or false", int: "a number", float: "a number with a fraction", str: "a text", list: "a list",
    dict: "an object", type(None): "null",
}  # fmt: skip
_WANTED_TYPES = {
    "string": "a text in quotes",
    "array": "a list in [ ]",
    "integer": "a whole number",
}
_LINE_BREAK = re.compile(r"[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")


@functools.cache
def validator() -> Any:
    """The schema's validator. JSON Schema counts 970.0 as an integer; the publisher does not, nor do we."""
    types = Draft202012Validator.TYPE_CHECKER.redefine(
        "integer", lambda _, value: isinstance(value, int) and not isinstance(value, bool)
    )
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    return extend(Draft202012Validator, type_checker=types)(schema)


def schema_faults(fragment: Fragment) -> Iterator[Fault]:
    """Every place where *fragment* breaks the schema, one fault for each."""
    seen: set[tuple[str, str]] = set()
    for error in validator().iter_errors(fragment.value):
        for fault in _explain(fragment.file, error):
            if (fault.path, fault.code) not in seen:
                seen.add((fault.path, fault.code))
                yield fault


def _explain(file: str, error: ValidationError) -> Iterator[Fault]:
    path, value, kind = error.json_path, error.instance, str(error.validator)
    rule: Any = error.validator_value
    name = _field(error)
    if kind == "required":
        for key in sorted(set(rule) - set(value)):
            yield Fault(file, f"$.{key}", "is missing", f"add it: {_example(key)}", "missing")
    elif kind == "additionalProperties":
        for key in sorted(set(value) - set(FIELDS)):
            close = difflib.get_close_matches(key, FIELDS, 1)
            fix = f'write "{close[0]}"' if close else f"remove it; the keys are {', '.join(FIELDS)}"
            yield Fault(file, f"$.{plain(key)}", "is an unknown key", fix, "unknown-key")
    elif kind == "anyOf":
        yield Fault(
            file, "$", "names neither a pull request nor an author",
            'add "pull_requests": [970] or, for a direct change, "authors": ["octocat"]', "credit",
        )  # fmt: skip
    elif kind == "type":
        what = f"is {_JSON_TYPES[type(_plain_type(value))]}, wanted {_WANTED_TYPES.get(rule, rule)}"
        yield Fault(file, path, what, _example(name), "type")
    elif kind == "const":
        yield Fault(file, path, f"is {_show(value)}", f'write "{SCHEMA}"', "schema")
    elif kind == "enum":
        yield Fault(
            file, path, f"is {_show(value)}", f"write one of {', '.join(SECTIONS)}", "category"
        )
    elif kind == "minItems":
        yield Fault(file, path, "is empty", _example(name), "empty")
    elif kind == "uniqueItems":
        yield Fault(
            file, path, f"has {_show(_first_double(value))} twice", "keep one of them", "duplicate"
        )
    elif kind == "minimum":
        yield Fault(
            file, path, f"is {value}", "write the number of a pull request, 1 or more", "minimum"
        )
    elif kind in ("minLength", "pattern"):
        yield _text_fault(file, path, name, value)
    else:  # a keyword that the schema gained and this function did not
        yield Fault(
            file,
            path,
            plain(error.message),
            "see scripts/b12x_overlay/changes/fragment.schema.json",
            kind,
        )


def _text_fault(file: str, path: str, name: str, value: str) -> Fault:
    if not value.strip():
        return Fault(file, path, "is blank", _example(name), "blank")
    if name in ("id", "requires"):
        fix = "use lower-case letters, digits and single hyphens: <component>-<words>"
        return Fault(file, path, f"{_show(value)} is no fragment id", fix, "id-form")
    if name == "authors":
        bare = value.lstrip("@").strip()
        fix = (
            f'write "{bare}"'
            if bare != value and " " not in bare
            else "write the GitHub handle, without @"
        )
        return Fault(file, path, f"{_show(value)} is no GitHub handle", fix, "author-form")
    if name == "evidence":
        return Fault(
            file,
            path,
            f"{_show(value)} is no web address",
            "write an http(s):// address",
            "url-form",
        )
    if _LINE_BREAK.search(value):
        return Fault(
            file,
            path,
            "has a line break",
            "write it on one line; more goes into details",
            "line-break",
        )
    return Fault(
        file, path, f"has a control character: {_show(value)}", "remove it", "control-character"
    )


def _field(error: ValidationError) -> str:
    return str(error.absolute_path[0]) if error.absolute_path else ""


def _plain_type(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value


def _first_double(values: list[Any]) -> Any:
    return next(
        (value for index, value in enumerate(values) if value in values[:index]), values[-1]
    )


def _show(value: Any) -> str:
    text = plain(json.dumps(value, ensure_ascii=False))
    return text if len(text) <= 80 else text[:77] + "..."


def _example(name: str) -> str:
    return {
        "schema": f'"schema": "{SCHEMA}"',
        "id": '"id": "vllm-short-name", equal to the file name without .json',
        "category": f'"category": one of {", ".join(SECTIONS)}',
        "summary": '"summary": "One sentence for the user."',
        "models": '"models": ["GLM-5.3-Flash"], or ["all"] for the whole runtime',
        "compatibility": f'"compatibility": "{NO_ACTION}" or what the user must do',
        "details": '"details": ["One fact."]',
        "pull_requests": '"pull_requests": [970]',
        "authors": '"authors": ["octocat"]',
        "requires": '"requires": ["vllm-other-change"]',
        "evidence": '"evidence": ["https://…"]',
    }.get(name, "see scripts/b12x_overlay/changes/fragment.schema.json")
