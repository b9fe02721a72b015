# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tests on the patched tree: what passes on the released tree passes on ours.

The tests come from the pinned source distribution. They run under a pretended SM120 platform, so what launches a
kernel cannot run; NOT_ON_CPU lists that by name and reason, and is itself checked against the released tree.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from b12x_overlay import bootstrap
from b12x_overlay.patching import fetch, patchset
from support.paths import PATCHES, SCRIPTS, pythonpath

B12X = ("tests/kernels/moe/test_b12x.py", "tests/model_executor/test_b12x_warmup.py")
MODELOPT = ("tests/quantization/test_modelopt.py",)

_KERNELS = "launches b12x kernels on an SM120 device"
_CUDA = "works on CUDA tensors"
_ENGINE = "starts an engine on a GPU (fixture vllm_runner of vLLM's conftest)"
_GROUPS = "makes process groups on an accelerator (fixture dist_init of vLLM's conftest)"
NOT_ON_CPU = {
    "tests/kernels/moe/test_b12x.py": {
        "test_b12x_nvfp4_preparation_pads_each_gated_half": _CUDA,
        "test_b12x_moe_matches_torch": _KERNELS,
        "test_b12x_moe_cuda_graph_replay": _KERNELS,
        "test_b12x_block_quant_relu2_moe_graph": _KERNELS,
    },
    "tests/model_executor/test_b12x_warmup.py": {},
    "tests/quantization/test_modelopt.py": {
        "test_modelopt_mxfp8_preserves_per_row_checkpoint_scales": _GROUPS,
        "test_modelopt_mixed_precision_composes_gemma4_mappers": "needs torchvision",
        "test_modelopt_fp8_checkpoint_setup": _ENGINE,
        "test_modelopt_nested_mixed_checkpoint": _ENGINE,
        "test_modelopt_mixed_dspark_checkpoint": _ENGINE,
        "test_modelopt_fp8_pc_pt_checkpoint_setup": _ENGINE,
        "test_modelopt_fp8_pb_wo_checkpoint_setup": _ENGINE,
        "test_modelopt_w4a16_respects_linear_backend": "two of its backends are not installed",
    },
}


def sdist_tests() -> Path:
    """The folder that holds vLLM's tests/; fetches and unpacks the source distribution on first use."""
    pin = patchset.load(PATCHES, PATCHES.parent / "overlay").pin
    tree = fetch.default_tree(pin)
    if not tree.is_dir():
        code = (
            "from b12x_overlay.patching import fetch, patchset; from b12x_overlay.paths import OVERLAY, PATCHES; "
            "fetch.pinned_tree(patchset.load(PATCHES, OVERLAY).pin, print)"
        )
        env = {**os.environ, "PYTHONPATH": str(SCRIPTS)}
        subprocess.run(
            [bootstrap.ensure("apply"), "-c", code], env=env, stdin=subprocess.DEVNULL, check=True
        )
    return tree


def outcomes(
    root: Path, tree: str, provider: str, files: tuple[str, ...]
) -> dict[str, tuple[str, str]]:
    """Outcome and reason of every test in *files* with *tree* and *provider*; *root* holds tests/."""
    result = root / f"{tree}-{provider}.json"
    env = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "B12X_"))}
    env["PYTHONPATH"] = os.pathsep.join((pythonpath(tree, provider), str(root)))
    env["UPSTREAM_OUTCOMES"] = str(result)
    command = [
        sys.executable, "-m", "pytest", "-p", "support.upstream_plugin", "-p", "no:cacheprovider", "--noconftest",
        "-c", os.devnull, f"--rootdir={root}", "--import-mode=importlib", "-q", *files,
    ]  # fmt: skip
    run = subprocess.run(
        command,
        cwd=root,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.exists(), run.stdout[-3000:] + run.stderr[-3000:]
    return {
        name: (outcome, reason)
        for name, (outcome, reason) in json.loads(result.read_text()).items()
    }


@pytest.mark.parametrize(
    ("provider", "files"),
    [("b12x-flashinfer", B12X + MODELOPT), ("b12x-pypi", B12X)],
    ids=["flashinfer", "pypi"],
)
def test_what_passes_on_the_released_tree_passes_on_ours(
    tmp_path: Path, provider: str, files: tuple[str, ...]
) -> None:
    # Only tests/ is linked here: the source tree's own vllm/ must not be found.
    (tmp_path / "tests").symlink_to(sdist_tests() / "tests")
    stock = outcomes(tmp_path, "stock", provider, files)
    patched = outcomes(tmp_path, "patched", provider, files)

    def passed(of: dict[str, tuple[str, str]]) -> set[str]:
        return {name for name, (outcome, _) in of.items() if outcome == "passed"}

    lost = {name: patched.get(name) for name in passed(stock) - passed(patched)}
    assert not lost
    unable = {tuple(name.partition("[")[0].split("::")) for name in stock.keys() - passed(stock)}
    listed = {(file, name) for file in files for name in NOT_ON_CPU[file]}
    assert unable == listed
    print(f"{len(passed(stock))} of {len(stock)} tests pass on both trees")
