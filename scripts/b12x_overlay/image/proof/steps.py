# SPDX-License-Identifier: Apache-2.0
"""What is proven, step by step; each function raises AssertionError with what was seen instead."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from b12x_overlay.image import content, engines, manifest
from b12x_overlay.image.proof.tampering import TAMPERED, VLLM
from b12x_overlay.image.proof.tools import STANDIN, Workshop, run
from b12x_overlay.paths import REPO


@dataclass
class Seen:
    """What later steps need from earlier ones."""

    shop: Workshop
    plan: dict[str, Any] = field(default_factory=dict)
    image: str = ""
    notes: dict[str, Any] = field(default_factory=dict)


def standin(seen: Seen) -> str:
    """The stand-in base with the real vllm wheel."""
    seen.shop.make_standin()
    return STANDIN


def plan_only(seen: Seen) -> str:
    """--print says the tag and builds nothing."""
    before = seen.shop.buildah("images", "--quiet").stdout
    out = seen.shop.build_image("--base", STANDIN, "--print", "--json").stdout
    seen.plan = json.loads(out)
    assert seen.shop.buildah("images", "--quiet").stdout == before, "--print built something"
    line, date, identity = seen.plan["tag"].rsplit("-", 2)
    assert (len(date), identity) == (8, seen.plan["content_id"][:16]), seen.plan["tag"]
    return f"{line}, {date}, {identity}"


def built_twice(seen: Seen) -> str:
    """The real Dockerfile, built twice through build-image: the tag that was planned, equal layers, equal image ids."""
    ids = []
    for _ in range(2):
        out = json.loads(seen.shop.build_image("--base", STANDIN, "--json").stdout)
        assert out["image"] == seen.plan["image"], (
            f"{out['image']} was built, {seen.plan['image']} was planned"
        )
        assert out["verify"] == "patched", out["verify"]
        ids.append((out["image_id"], _inspect(seen, out["image"]).layers))
    assert ids[0] == ids[1], f"two builds differ: {ids}"
    seen.image = seen.plan["image"]
    base = _inspect(seen, STANDIN).layers
    assert ids[0][1][: len(base)] == base, "the base's layers are not at the bottom"
    return f"image {ids[0][0][:16]}, {len(ids[0][1]) - len(base)} layer of its own"


def says_what_it_is(seen: Seen) -> str:
    """Labels, entrypoint, user, folder and cache folders."""
    info, base = _inspect(seen, seen.image), _inspect(seen, STANDIN)
    for name in ("entrypoint", "cmd", "user", "workdir"):
        assert getattr(info, name) == getattr(base, name), f"{name}: {getattr(info, name)}"
    wanted = {
        "org.opencontainers.image.version": seen.plan["tag"],
        "org.opencontainers.image.base.digest": base.digest,
        "org.opencontainers.image.revision": seen.plan["source"]["revision"],
        "b12x-overlay.content-id": seen.plan["content_id"],
        "b12x-overlay.patchset": seen.plan["patchset"],
        "ai.vllm.build.commit": "4ba787ec9",
    }
    for label, value in wanted.items():
        assert info.labels.get(label) == value, (
            f"{label}: {info.labels.get(label)!r}, wanted {value!r}"
        )
    for label, value in info.labels.items():
        if label.startswith("org.opencontainers."):
            assert value != base.labels.get(label) or not value, (
                f"{label} still speaks of the base: {value}"
            )
    caches = [entry for entry in info.env if "/cache/" in entry]
    assert len(caches) == 7, caches
    assert all(seen.plan["content_id"] in entry for entry in caches), caches
    assert set(base.env) <= set(info.env), "the base's variables changed"
    return f"{len(info.labels)} labels, {len(caches)} cache folders"


def verifies_quickly(seen: Seen) -> str:
    """verify passes inside, without network or GPU, and as another user; doctor runs."""
    container = seen.shop.start(seen.image)
    result = seen.shop.execute(container, "python3", f"{manifest.FOLDER}/verify", "--json")
    verdict = json.loads(result.stdout)
    assert (result.returncode, verdict["state"]) == (0, "patched"), verdict
    assert verdict["files"] > 5800, verdict["files"]
    assert verdict["content_id"] == seen.plan["content_id"], verdict["content_id"]
    other = seen.shop.buildah(
        "run", "--network", "none", "--user", "2000:0", container, "--", "sh", "-euc",
        f"python3 {manifest.FOLDER}/verify -q; mkdir -p $TRITON_CACHE_DIR; touch $TRITON_CACHE_DIR/x",
        check=False,
    )  # fmt: skip
    assert other.returncode == 0, f"as user 2000: {other.stdout}{other.stderr}"
    report = json.loads(
        seen.shop.execute(container, "python3", f"{manifest.FOLDER}/doctor", "--json").stdout
    )
    assert report["vllm"]["state"] == "patched", report["vllm"]
    left = seen.shop.execute(
        container, "sh", "-c", f"find / -xdev -name '*.pyc' -newer {manifest.FOLDER}/verify | wc -l"
    )
    assert left.stdout.strip() == "0", f"running the programs left {left.stdout.strip()} .pyc files"
    seen.shop.buildah("rm", container)
    return f"{verdict['files']} files compared"


def tampering_shows(seen: Seen) -> str:
    """Every kind of tampering fails verify and names the file."""
    for name, (script, file) in TAMPERED.items():
        container = seen.shop.start(seen.image)
        done = seen.shop.execute(container, "sh", "-euc", script)
        assert done.returncode == 0, f"{name}: the tampering itself failed: {done.stderr}"
        result = seen.shop.execute(container, "python3", f"{manifest.FOLDER}/verify", "--json")
        verdict = json.loads(result.stdout)
        paths = [fault["path"] for fault in verdict["faults"]]
        assert (result.returncode, verdict["state"]) == (1, "modified"), f"{name}: {verdict}"
        assert any(file in path for path in paths), f"{name}: {paths}"
        seen.shop.buildah("rm", container)
    return ", ".join(TAMPERED)


def wrong_bases_are_refused(seen: Seen) -> str:
    """A base with one changed file, without vllm, for another architecture, or already patched."""
    shop = seen.shop
    edited = shop.derive(STANDIN, "edited", f"printf '#' >> {VLLM}/envs.py")
    _refused(seen, edited, "vllm/envs.py is edited")
    added = shop.derive(STANDIN, "added", f"touch {VLLM}/model_executor/leftover.py")
    _refused(seen, added, "leftover.py is added")
    none = shop.derive(STANDIN, "none", f"d={VLLM}; rm -rf $d $d-0.33.0.dist-info")
    _refused(seen, none, "no vllm")
    _refused(seen, f"localhost/{seen.image}", "is patched, not stock")
    arm = shop.derive(STANDIN, "arm", "", arch="arm64")
    _refused(seen, arm, "is for arm64, asked for is amd64")
    # Past build-image's own look: the base says arm64 and its files are not.
    result = _plain_build(seen, arm, "--build-arg", "ARCH=arm64", "--platform", "linux/arm64")
    assert result.returncode != 0, "a base that lies about its architecture was taken"
    assert "asked for is arm64" in result.stdout + result.stderr, result.stderr[-500:]
    return "edited, extra file, no vllm, patched before, other architecture, false architecture"


def plain_build(seen: Seen) -> str:
    """`docker build -f docker/Dockerfile .` without arguments works, and a false content id is refused."""
    result = _plain_build(seen, STANDIN, "-t", "localhost/plain:test")
    assert result.returncode == 0, result.stderr[-500:]
    caches = [
        entry
        for entry in _inspect(seen, "localhost/plain:test").env
        if entry.startswith("TRITON_CACHE_DIR")
    ]
    assert caches == ["TRITON_CACHE_DIR=/tmp/b12x-overlay-cache/triton"], caches
    wrong = _plain_build(seen, STANDIN, "--build-arg", f"CONTENT_ID={'0' * 64}")
    assert wrong.returncode != 0, "a false content id was taken"
    assert "CONTENT_ID is" in wrong.stdout + wrong.stderr, wrong.stderr[-500:]
    return "works without arguments; a false CONTENT_ID is refused"


def clash_is_diagnosed(seen: Seen) -> str:
    """A base with PyPI's b12x 1.5.1 beside flashinfer: built, recorded in the manifest, named by doctor."""
    script = "/mnt/uv pip install -q --system --offline --no-cache --no-deps"
    both = seen.shop.derive(
        STANDIN,
        "both",
        f"{script} /mnt/flashinfer_python-*.whl; {script} /mnt/b12x-*.whl",
        wheels_mounted=True,
    )
    out = json.loads(seen.shop.build_image("--base", both, "--name", "clash", "--json").stdout)
    container = seen.shop.start(out["image"])
    report = json.loads(
        seen.shop.execute(container, "python3", f"{manifest.FOLDER}/doctor", "--json").stdout
    )
    assert report["b12x"]["clash"], report["b12x"]
    assert report["b12x"]["provider"] == "b12x", report["b12x"]
    texts = [
        finding["text"] for finding in report["findings"] if "two packages own" in finding["text"]
    ]
    assert texts, report["findings"]
    recorded = json.loads(
        seen.shop.execute(container, "cat", f"{manifest.FOLDER}/manifest.json").stdout
    )
    assert recorded["found"]["b12x"]["clash"], recorded["found"]["b12x"]
    verdict = seen.shop.execute(container, "python3", f"{manifest.FOLDER}/verify")
    assert verdict.returncode == 0, verdict.stdout
    seen.shop.buildah("rm", container)
    return str(recorded["found"]["b12x"]["label"])


def exports(seen: Seen) -> str:
    """OCI archive, SBOM and receipt; the top layer holds the manifest's files and nothing else."""
    folder = seen.shop.folder / "dist"
    for path in folder.glob("*"):
        path.unlink()
    out = json.loads(
        seen.shop.build_image("--base", STANDIN, "--output", str(folder), "--json").stdout
    )
    archive = folder / out["files"]["archive"]["file"]
    digest, files = _top_layer(archive)
    assert digest == out["files"]["manifest_digest"], digest
    listed = {entry["path"].lstrip("/") for entry in files["manifest"]["files"]}
    assert set(files["names"]) == listed, f"layer {sorted(set(files['names']) ^ listed)}"
    bill = json.loads((folder / out["files"]["sbom"]["file"]).read_text())
    assert bill["bomFormat"] == "CycloneDX", bill.get("bomFormat")
    (vllm,) = [entry for entry in bill["components"] if entry["name"] == "vllm"]
    assert seen.plan["patchset"] in vllm["pedigree"]["notes"], vllm
    receipt = json.loads(next(folder.glob("*.receipt.json")).read_text())
    assert receipt["files"] == out["files"], receipt["files"]
    again = seen.shop.build_image("--base", STANDIN, "--output", str(folder), check=False)
    assert again.returncode == 3, "an existing export was overwritten"
    return f"{len(listed)} files in the layer, {archive.stat().st_size >> 20} MB, {len(bill['components'])} in the SBOM"


def wheel_target(seen: Seen) -> str:
    """A virtual environment with pip-installed patched wheel verifies the same way; uninstalled, it is gone."""
    uv = str(seen.shop.folder / "wheels" / "uv")
    wheel = next(path for path in (seen.shop.folder / "wheels").glob("vllm-*.whl"))
    made = seen.shop.folder / "patched-wheel"
    made.mkdir(exist_ok=True)
    for path in made.glob("*.whl"):
        path.unlink()
    command = [
        sys.executable,
        str(REPO / "scripts" / "apply-patches"),
        "apply",
        "--target",
        str(wheel),
        "--output",
        str(made),
    ]
    run(command, env=seen.shop.environment)
    venv = seen.shop.folder / "venv"
    run(
        [uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(venv)],
        env=seen.shop.environment,
    )
    python = str(venv / "bin" / "python")
    (patched,) = made.glob("*.whl")
    install = [
        uv,
        "pip",
        "install",
        "--quiet",
        "--offline",
        "--no-cache",
        "--no-deps",
        "--python",
        python,
    ]
    run([*install, str(patched)], env=seen.shop.environment)
    folder = seen.shop.folder / "programs"
    seen.shop.build_image("--programs", str(folder))
    verify = [python, str(folder / "verify"), "--json"]
    verdict = json.loads(run(verify, env=seen.shop.environment, check=False).stdout)
    assert verdict["state"] == "patched", verdict
    run([uv, "pip", "uninstall", "--quiet", "--python", python, "vllm"], env=seen.shop.environment)
    gone = json.loads(run(verify, env=seen.shop.environment, check=False).stdout)
    assert gone["state"] == "absent", gone
    run([*install, str(wheel)], env=seen.shop.environment)
    stock = run(verify, env=seen.shop.environment, check=False)
    assert (stock.returncode, json.loads(stock.stdout)["state"]) == (1, "stock"), stock.stdout
    return f"{patched.name}: patched, after uninstalling absent, with the stock wheel stock"


STEPS: tuple[Callable[[Seen], str], ...] = (
    standin, plan_only, built_twice, says_what_it_is, verifies_quickly, tampering_shows, wrong_bases_are_refused,
    plain_build, clash_is_diagnosed, exports, wheel_target,
)  # fmt: skip


def _inspect(seen: Seen, image: str) -> engines.ImageInfo:
    engine = next(engine for engine in engines.ENGINES if engine.name == "buildah")
    info = engine.inspect(image)
    assert info is not None, f"no image {image}"
    return info


def _plain_build(seen: Seen, base: str, *arguments: str) -> Any:
    return seen.shop.buildah(
        "bud", "--network", "none", "--pull-never", "--build-arg", f"BASE_IMAGE={base}", *arguments,
        "-f", str(content.DOCKERFILE), str(REPO), check=False,
    )  # fmt: skip


def _refused(seen: Seen, base: str, words: str) -> None:
    result = seen.shop.build_image("--base", base, "--name", "refused", check=False)
    output = result.stdout + result.stderr
    assert result.returncode in (3, 4), f"{base}: ended with {result.returncode}\n{output[-800:]}"
    assert words in output, f"{base}: {words!r} is not in\n{output[-1500:]}"
    left = seen.shop.buildah(
        "images", "--quiet", "--filter", "reference=localhost/refused*", check=False
    )
    assert not left.stdout.strip(), f"{base}: an image was left"


def _top_layer(archive: Path) -> tuple[str, dict[str, Any]]:
    """(manifest digest, {"names": files in the top layer, "manifest": our manifest}) of an OCI archive."""
    with tarfile.open(archive) as stream:

        def blob(digest: str) -> bytes:
            member = stream.extractfile(f"blobs/sha256/{digest.partition(':')[2]}")
            assert member is not None
            data: bytes = member.read()
            return data

        index = stream.extractfile("index.json")
        assert index is not None
        digest = str(json.load(index)["manifests"][0]["digest"])
        layers = json.loads(blob(digest))["layers"]
        with tarfile.open(fileobj=io.BytesIO(blob(layers[-1]["digest"]))) as layer:
            names = [member.name for member in layer if not member.isdir()]
            member = layer.extractfile(manifest.FOLDER.lstrip("/") + "/manifest.json")
            assert member is not None
            return digest, {"names": names, "manifest": json.load(member)}
