# SPDX-License-Identifier: Apache-2.0
"""Which package gives ``import b12x``, and whether two of them clash; nothing is imported.

flashinfer-python bundles a b12x of its own, and PyPI has one: both install ``b12x/__init__.py``, the last writer wins,
and pip says nothing. ``find_spec`` cannot tell them apart, the RECORD of each distribution can: exactly one of them
lists the hash that the file really has.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.machinery
import importlib.metadata
from dataclasses import dataclass, field
from pathlib import Path

from b12x_overlay.doctor import packages
from b12x_overlay.doctor.abilities import Abilities, probe
from b12x_overlay.doctor.findings import Finding, Level

FLASHINFER = "flashinfer-python"
PYPI = "b12x"
_INIT = "b12x/__init__.py"
_PLUGINS = "vllm.general_plugins"


@dataclass(frozen=True)
class Provider:
    """What ``import b12x`` gives.

    Attributes:
        name: "flashinfer-python", "b12x", "unknown" (a source tree or an edited copy), "broken" or "none".
        version: of the distribution, None if unknown.
        origin: the ``__init__.py`` that is imported.
        root: the folder with the implementation; for flashinfer's it lies inside flashinfer.
        owners: distributions whose RECORD lists ``b12x/__init__.py`` at that place.
        plugins_missing: vLLM plugins of an installed b12x whose modules this provider does not have.
    """

    name: str
    version: str | None = None
    origin: Path | None = None
    root: Path | None = None
    owners: tuple[str, ...] = ()
    plugins_missing: tuple[str, ...] = ()
    abilities: Abilities = field(default_factory=Abilities)

    @property
    def clash(self) -> bool:
        """Two distributions own the same file."""
        return len(self.owners) > 1

    @property
    def usable(self) -> bool:
        """``import b12x`` gives a b12x with a fused MoE."""
        return self.name not in ("none", "broken") and self.abilities.fused_moe

    @property
    def label(self) -> str:
        """For people: name and version."""
        words = {
            FLASHINFER: f"the b12x bundled in flashinfer-python {self.version}",
            PYPI: f"PyPI's b12x {self.version}",
            "unknown": "a b12x of unknown origin",
        }
        return words.get(self.name, self.name)


def detect() -> Provider:
    """Find the provider from files and metadata on ``sys.path``."""
    spec = importlib.machinery.PathFinder.find_spec("b12x")
    if spec is None:
        return Provider("none")
    if spec.origin is None:  # a namespace package: the folder is there, its __init__.py is not
        locations = list(spec.submodule_search_locations or [])
        return Provider("broken", root=Path(locations[0]) if locations else None)
    origin = Path(spec.origin).resolve()
    owners = {
        d.name: d for name in (FLASHINFER, PYPI) if (d := packages.find(name)) and _owns(d, origin)
    }
    name, version = "unknown", None
    for owner in owners.values():
        if _record_digest(owner) == _digest(origin):
            name, version = owner.name, owner.version
    root: Path | None = origin.parent
    if name == FLASHINFER or (name == "unknown" and "flashinfer" in _text(origin)):
        flashinfer = packages.package_folder("flashinfer")
        root = flashinfer / "experimental" / "b12x" if flashinfer else None
    if root is None or not root.is_dir():
        return Provider("broken", version, origin, None, tuple(owners))
    missing = _missing_plugins(owners.get(PYPI), root)
    return Provider(name, version, origin, root, tuple(owners), missing, probe(root))


def findings(provider: Provider, wanted_flashinfer: str | None) -> list[Finding]:
    """What to tell about *provider*; *wanted_flashinfer* is the version that the installed vllm pins."""
    flashinfer = packages.find(FLASHINFER)
    version = wanted_flashinfer or (flashinfer.version if flashinfer else "0.7.2.post1")
    repair = f"pip install --force-reinstall --no-deps flashinfer-python=={version}"
    if provider.name == "none":
        if wanted_flashinfer is None:
            return [Finding("b12x", Level.NOTE, "no module named b12x, and no vllm that needs it")]
        return [
            Finding(
                "b12x",
                Level.PROBLEM,
                "no module named b12x: the b12x MoE backend cannot run",
                repair,
            )
        ]
    if provider.name == "broken":
        text = f"b12x is incomplete ({provider.origin or provider.root}): an uninstall took files of the other provider"
        return [Finding("b12x", Level.PROBLEM, text, repair)]
    found = []
    if provider.clash:
        loser = next(owner for owner in provider.owners if owner != provider.name)
        text = (
            f"two packages own b12x/__init__.py: {' and '.join(provider.owners)}. The files of {provider.label} are "
            f"there now; the next install or uninstall of either changes that, and uninstalling breaks both"
        )
        if provider.name == "unknown":
            text = f"two packages own b12x/__init__.py ({' and '.join(provider.owners)}) and it matches neither"
        elif loser == FLASHINFER:
            text += ". PyPI's b12x has no NVFP4-CSF"
        fix = f"to keep flashinfer's: pip uninstall -y b12x, then {repair}"
        found.append(Finding("b12x", Level.WARNING, text, fix))
    elif provider.name == "unknown":
        text = f"{provider.origin} matches no installed package: a source tree, or an edited copy"
        found.append(Finding("b12x", Level.WARNING, text, f"if that is not intended: {repair}"))
    else:
        found.append(Finding("b12x", Level.OK, f"import b12x gives {provider.label}"))
    found.append(
        Finding("b12x", Level.OK if provider.usable else Level.PROBLEM, _can(provider.abilities))
    )
    if provider.plugins_missing:
        text = f"vLLM will log 'Failed to load plugin' for {', '.join(provider.plugins_missing)}: harmless, not in it"
        found.append(Finding("b12x", Level.NOTE, text))
    if flashinfer and wanted_flashinfer and flashinfer.version != wanted_flashinfer:
        text = f"flashinfer-python is {flashinfer.version}, vllm needs {wanted_flashinfer}"
        found.append(Finding("b12x", Level.WARNING, text, repair))
    return found


def _can(abilities: Abilities) -> str:
    """What the provider can do, in words."""
    texts = (
        ("fused MoE", abilities.fused_moe),
        ("A4 and W4A16 over one weight plan", abilities.dual_plan),
        ("A4 prefill in its own bind", abilities.a4_prefill),
        ("NVFP4-CSF of its own", abilities.csf),
    )
    return "it has " + ", ".join(f"{'' if has else 'no '}{text}" for text, has in texts)


def _owns(owner: packages.Installed, origin: Path) -> bool:
    """*owner*'s RECORD lists ``b12x/__init__.py``, and at *origin*: not a second copy elsewhere on the path."""
    return _record_digest(owner) is not None and (owner.site / _INIT).resolve() == origin


def _record_digest(owner: packages.Installed) -> str | None:
    """SHA-256 (hex) that *owner*'s RECORD has for ``b12x/__init__.py``; None if not listed."""
    for file in owner.distribution.files or []:
        if str(file) == _INIT and file.hash is not None and file.hash.mode == "sha256":
            padded = file.hash.value + "=" * (-len(file.hash.value) % 4)
            return base64.urlsafe_b64decode(padded).hex()
    return None


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _missing_plugins(owner: packages.Installed | None, root: Path) -> tuple[str, ...]:
    if owner is None:
        return ()
    missing = []
    for point in owner.distribution.entry_points:
        if point.group != _PLUGINS:
            continue
        module = root.joinpath(*point.module.split(".")[1:])
        if not module.with_suffix(".py").is_file() and not (module / "__init__.py").is_file():
            missing.append(point.name)
    return tuple(missing)
