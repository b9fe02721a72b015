# SPDX-License-Identifier: Apache-2.0
"""Looks at an image that was just built: does it say what was planned, and does it verify itself?"""

from __future__ import annotations

import json
from typing import Any

from b12x_overlay.console import CommandError
from b12x_overlay.exitcodes import ExitCode
from b12x_overlay.image import manifest
from b12x_overlay.image.engines import Engine, ImageInfo
from b12x_overlay.image.plan import Plan


def check(plan: Plan, engine: Engine, can_run: bool) -> tuple[ImageInfo, dict[str, Any]]:
    """Compare labels, entrypoint, user, folder and layers with the plan and the base, then run ``verify`` in it.

    Returns:
        What the engine says of the image, and what ``verify --json`` says (``{"state": "not run"}`` where the
        machine cannot run it).

    Raises:
        CommandError: the image is not what was planned; it is left in place for a look.
    """
    info = engine.inspect(plan.image)
    if info is None:
        raise _fault(plan, ["it is not there"])
    faults = _labels(plan, info) + (_like_base(info, plan.base_info) if plan.base_info else [])
    if faults:
        raise _fault(plan, faults)
    if not can_run:
        return info, {"state": "not run"}
    result = engine.run_python(plan.image, [f"{manifest.FOLDER}/verify", "--json"])
    try:
        verdict: dict[str, Any] = json.loads(result.stdout)
    except ValueError:
        raise _fault(plan, [f"verify did not answer: {result.stderr.strip()[-300:]}"]) from None
    if verdict["state"] != "patched" or verdict["content_id"] != plan.content_id:
        raise _fault(plan, [f"verify says {verdict['state']}, content id {verdict['content_id']}"])
    return info, verdict


def _labels(plan: Plan, info: ImageInfo) -> list[str]:
    arguments = plan.arguments()
    wanted = {
        "org.opencontainers.image.version": arguments["VERSION"],
        "org.opencontainers.image.revision": arguments["REVISION"],
        "org.opencontainers.image.source": arguments["SOURCE"],
        "org.opencontainers.image.base.name": arguments["BASE_NAME"],
        "org.opencontainers.image.base.digest": arguments["BASE_DIGEST"],
        "b12x-overlay.content-id": plan.content_id,
        "b12x-overlay.architecture": arguments["ARCH"],
    }
    faults = [
        f"label {name} is {info.labels.get(name)!r}, not {value!r}"
        for name, value in wanted.items()
        if info.labels.get(name) != value
    ]
    if info.architecture != arguments["ARCH"]:
        faults.append(f"it is for {info.architecture}, not {arguments['ARCH']}")
    return faults


def _like_base(info: ImageInfo, base: ImageInfo) -> list[str]:
    faults = []
    for name in ("entrypoint", "cmd", "user", "workdir"):
        if getattr(info, name) != getattr(base, name):
            faults.append(
                f"its {name} is {getattr(info, name)!r}, the base's is {getattr(base, name)!r}"
            )
    if info.layers[: len(base.layers)] != base.layers:
        faults.append("its lower layers are not those of the base")
    return faults


def _fault(plan: Plan, faults: list[str]) -> CommandError:
    return CommandError(
        f"{plan.image}: {'; '.join(faults)}", code=ExitCode.DIFFERENT, reason="image"
    )
