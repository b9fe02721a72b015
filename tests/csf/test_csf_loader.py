# SPDX-License-Identifier: Apache-2.0
"""The load format on small checkpoints in both layouts: what comes out, and what each kind of damage is called."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from csf import checkpoints, checkpoints_csf
from nvfp4_csf import codec
from nvfp4_csf.shards import read_header
from safetensors.torch import load_file, save_file

LAYOUTS = pytest.mark.parametrize("layout", ["container", "index"])


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> SimpleNamespace:
    """A source with an MTP layer, its container, serving folder and index layout."""
    root = tmp_path_factory.mktemp("loader")
    tensors = checkpoints.small(root / "source")
    box = checkpoints_csf.container(root / "source", root / "csf")
    return SimpleNamespace(
        source=root / "source",
        tensors=tensors,
        container=box,
        serve=checkpoints_csf.serving(box, root / "serve"),
        index=checkpoints_csf.index_layout(box, root / "index"),
    )


@pytest.fixture
def csf(vllm):
    from vllm.model_executor.layers.quantization.nvfp4_csf import (
        config,
        container,
        guard,
        inventory,
        method,
        streams_loader,
    )
    from vllm.model_executor.model_loader import nvfp4_csf_loader

    return SimpleNamespace(
        config=config, inventory=inventory, loader=nvfp4_csf_loader, method=method, guard=guard,
        streams=streams_loader, error=container.ContainerError, shard_error=container.ShardError,
        place=container.Place,
    )  # fmt: skip


def checkpoint(csf: Any, root: Path, layout: str = "container") -> Any:
    return csf.config.CsfCheckpoint(root, layout == "container")


def model_with(csf: Any, layers: list[int], prefix: str = "model") -> torch.nn.Module:
    """Modules that look to the loader like a model with CSF layers."""
    model = torch.nn.Module()
    for layer in layers:
        module = torch.nn.Module()
        module.layer_name = f"{prefix}.layers.{layer}.mlp.experts"
        module.quant_method = csf.method.CsfStreamsModelOptNvFp4FusedMoE.__new__(
            csf.method.CsfStreamsModelOptNvFp4FusedMoE
        )
        model.add_module(f"layer{layer}", module)
    return model


def weights(csf: Any, folder: Path, layers: list[int], **model: Any) -> dict[str, torch.Tensor]:
    """Everything that ``--load-format nvfp4_csf`` hands to a model that has these compressed layers."""
    from vllm.config.load import LoadConfig

    load = csf.loader.Nvfp4CsfModelLoader(
        LoadConfig(load_format="nvfp4_csf", use_tqdm_on_load=False)
    )
    config = SimpleNamespace(
        model=str(folder), revision=None, runner_type=model.pop("runner", "generate")
    )
    found: dict[str, torch.Tensor] = {}
    for name, tensor in load.get_all_weights(config, model_with(csf, layers, **model)):
        assert name not in found
        found[name] = tensor
    return found


def folder_of(made: Any, layout: str) -> Path:
    return made.serve if layout == "container" else made.index


@LAYOUTS
def test_every_tensor_comes_out_byte_exact(csf, made, layout: str) -> None:
    found = weights(csf, folder_of(made, layout), [0, 1])
    assert set(found) == set(made.tensors)
    compressed = 0
    for name, tensor in made.tensors.items():
        if found[name].dtype == tensor.dtype:
            assert checkpoints.as_bytes(found[name]) == checkpoints.as_bytes(tensor)
            continue
        compressed += 1
        streams, _ = csf.streams.unpack(found[name], name)
        decoded = codec.decode(codec.CsfStreams(*tensor.shape, streams.fixed, streams.exceptions))
        assert decoded.tobytes() == checkpoints.as_bytes(tensor)
    assert compressed == 2 * 2 * 3
    mtp = "model.layers.2.mlp.experts.1.up_proj.weight_scale"
    assert found[mtp].dtype == torch.float8_e4m3fn


@LAYOUTS
def test_a_draft_model_gets_its_own_layers_the_ordinary_way(csf, made, layout: str) -> None:
    """The MTP draft of the same checkpoint has none of the compressed layers: no stream is read for it."""
    found = weights(csf, folder_of(made, layout), [], runner="draft")
    assert not any(t.dtype == torch.uint8 and n.endswith("weight_scale") for n, t in found.items())
    assert found["model.layers.2.mlp.experts.0.down_proj.weight_scale"].dtype == torch.float8_e4m3fn


def test_an_ordinary_checkpoint_is_refused_for_a_target_and_taken_for_a_draft(csf, made) -> None:
    with pytest.raises(ValueError, match="needs a CSF checkpoint and this is an ordinary one"):
        weights(csf, made.source, [])
    found = weights(csf, made.source, [], runner="draft")
    assert {name: checkpoints.as_bytes(t) for name, t in found.items()} == {
        name: checkpoints.as_bytes(t) for name, t in made.tensors.items()
    }


@LAYOUTS
def test_inventory_says_which_layers_are_compressed(csf, made, layout: str) -> None:
    root = made.container if layout == "container" else made.index
    found = csf.inventory.take_inventory(checkpoint(csf, root, layout))
    assert found.layers == {(False, 0), (False, 1)}
    assert len(found.shapes) == 12


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("model.language_model.layers.44.mlp.experts.7.up_proj.weight_scale", (False, 44)),
        ("language_model.model.layers.44.mlp.experts", (False, 44)),
        ("mtp.layers.0.mlp.experts", (True, 0)),
        ("model.mtp_layers.layers.1.mlp.experts", (True, 1)),
        ("lm_head", None),
    ],
)
def test_layer_keys_match_across_namings(csf, name: str, key) -> None:
    assert csf.inventory.layer_key(name) == key


def copy_of(made: Any, tmp_path: Path, layout: str) -> Path:
    import shutil

    return Path(
        shutil.copytree(made.container if layout == "container" else made.index, tmp_path / "copy")
    )


def shards_of(root: Path) -> list[Path]:
    return sorted(root.rglob("*.safetensors"))


def rewrite(root: Path, edit, rename=None) -> None:
    """Edit the tensors of every shard and make all documents of the checkpoint agree again."""
    names: dict[str, str] = {}
    for shard in shards_of(root):
        tensors = load_file(shard)
        edit(tensors)
        save_file(tensors, shard, {"format": "pt"})
        names |= dict.fromkeys(tensors, shard.name)
    if not (root / "manifest.json").exists():
        (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        return
    manifest = json.loads((root / "manifest.json").read_text())
    for record in manifest["shards"]:
        record["target_file_bytes"] = (root / "tensors" / record["file"]).stat().st_size
    (root / "manifest.json").write_text(json.dumps(manifest))
    contract = json.loads((root / "build-contract.json").read_text())
    contract["source_names"] = {
        name.removesuffix(".nvfp4_csf_fixed"): file
        for name, file in names.items()
        if not name.endswith(".nvfp4_csf_exceptions")
    }
    (root / "build-contract.json").write_text(json.dumps(contract))


UP = "model.layers.1.mlp.experts.1.up_proj"


def drop(suffix: str):
    return lambda tensors: tensors.pop(UP + suffix, None)


def replace(suffix: str, make):
    def edit(tensors):
        if UP + suffix in tensors:
            tensors[UP + suffix] = make(tensors[UP + suffix])

    return edit


def drop_scale(tensors) -> None:
    for suffix in ("fixed", "exceptions"):
        tensors.pop(f"{UP}.weight_scale.nvfp4_csf_{suffix}", None)


def plain_scale(tensors) -> None:
    if f"{UP}.weight_scale.nvfp4_csf_fixed" in tensors:
        drop_scale(tensors)
        tensors[f"{UP}.weight_scale"] = torch.zeros(32, 4, dtype=torch.float8_e4m3fn)


DAMAGED = [
    (drop(".weight"), f".safetensors: {UP}.weight_scale: the checkpoint has no {UP}.weight beside it"),
    (drop(".weight_scale_2"), f"has no {UP}.weight_scale_2 beside it"),
    (drop_scale, f"the scales of 1 projections are missing, first {UP}.weight_scale"),
    (plain_scale, "the scales of 1 projections are not compressed while others are"),
    (drop(".weight_scale.nvfp4_csf_exceptions"), "has no .nvfp4_csf_exceptions beside it"),
    (drop(".weight_scale.nvfp4_csf_fixed"), "has no .nvfp4_csf_fixed beside it"),
    (replace(".weight_scale_2", lambda t: t.bfloat16()), "weight_scale_2 is BF16 []; one F32 value is wanted"),
    (replace(".weight_scale_2", lambda t: t.repeat(2)), "weight_scale_2 is F32 [2]; one F32 value"),
    (replace(".input_scale", lambda t: t.bfloat16()), "input_scale is BF16 []; one F32 value is wanted"),
    (replace(".weight", lambda t: t.view(torch.int8)), f".safetensors: {UP}.weight: I8 [32, 32]; packed FP4 is U8"),
    (replace(".weight_scale.nvfp4_csf_fixed", lambda t: t[:-16]), "has 80 bytes, 96 are wanted"),
    (replace(".weight_scale.nvfp4_csf_fixed", lambda t: t.view(torch.int8)), "fixed is I8; U8 is wanted"),
    (
        replace(".weight_scale.nvfp4_csf_exceptions", lambda t: t.view(torch.int32)),
        "exceptions is I32; U32 is wanted",
    ),
]  # fmt: skip


@LAYOUTS
@pytest.mark.parametrize(("edit", "message"), DAMAGED)
def test_damage_is_named_before_any_weight_is_read(
    csf, made, tmp_path, layout, edit, message
) -> None:
    root = copy_of(made, tmp_path, layout)
    rewrite(root, edit)
    with pytest.raises(csf.error) as caught:
        csf.inventory.take_inventory(checkpoint(csf, root, layout))
    assert message in str(caught.value)


@LAYOUTS
def test_truncated_missing_and_doubled_shards_are_named(csf, made, tmp_path, layout: str) -> None:
    root = copy_of(made, tmp_path, layout)
    shard = shards_of(root)[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-5])
    with pytest.raises(
        (csf.error, csf.shard_error),
        match=rf"{shard.name}: (truncated|{len(whole) - 5} bytes; manifest.json says)",
    ):
        csf.inventory.take_inventory(checkpoint(csf, root, layout))
    shard.unlink()
    with pytest.raises((csf.error, csf.shard_error), match=f"{shard.name}: missing"):
        csf.inventory.take_inventory(checkpoint(csf, root, layout))
    shard.write_bytes(whole)
    name = next(iter(load_file(shard)))
    other = shards_of(root)[0]
    tensors = load_file(other)
    tensors[name] = load_file(shard)[name]
    save_file(tensors, other, {"format": "pt"})
    if layout == "container":
        manifest = json.loads((root / "manifest.json").read_text())
        for record in manifest["shards"]:
            record["target_file_bytes"] = (root / "tensors" / record["file"]).stat().st_size
        (root / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(csf.error, match="and again in"):
        csf.inventory.take_inventory(checkpoint(csf, root, layout))


def replace_values(stream: str, index: int, value: int):
    """Structure intact, a value that no encoder writes."""
    name = f"{UP}.weight_scale.nvfp4_csf_{stream}"

    def edit(tensors) -> None:
        if name in tensors:
            tensor = tensors[name].clone()
            if stream == "exceptions":
                tensor = torch.tensor([0, 0, value], dtype=torch.uint32)
            else:
                tensor[index] = value
            tensors[name] = tensor

    return edit


@LAYOUTS
@pytest.mark.parametrize(
    ("stream", "index", "value", "reason"),
    [
        ("fixed", 3, 255, "base 255 of row 3 is above 240"),
        ("exceptions", 2, 0xFFFFFFFF, "position 16777215 is outside the 32 x 4 matrix"),
    ],
)
def test_damaged_streams_are_named_by_file_expert_and_byte(
    csf, made, tmp_path, layout, stream, index, value, reason
) -> None:
    """What only the values tell is found as the layer takes them, under a parameter's name."""
    root = copy_of(made, tmp_path, layout)
    rewrite(root, replace_values(stream, index, value))
    folder = root
    if layout == "container":
        folder = checkpoints_csf.serving(root, tmp_path / "serve")
    name = f"{UP}.weight_scale"
    shard = next(s for s in shards_of(root) if f"{name}.nvfp4_csf_fixed" in read_header(s).entries)
    packed = weights(csf, folder, [0, 1])[name]
    streams = csf.streams.RankStreams(2, 64, 32, 0, 1)
    with pytest.raises(csf.streams.CsfStreamError) as caught:
        streams.add(1, "w3", packed, "model.layers.0.mlp.experts.w13_weight_scale")
    offset = index * (4 if stream == "exceptions" else 1)
    header = read_header(shard)
    byte = header.entries[f"{name}.nvfp4_csf_{stream}"].begin + offset
    assert str(caught.value).startswith(
        f"{shard}: {name}: {stream} stream, byte {offset}: byte {byte} of the file: {reason}; "
    )
    with pytest.raises(ValueError, match=rf"{shard}: {name} \(for w13\): scales of a weight"):
        csf.streams.RankStreams(2, 128, 32, 0, 1).add(1, "w3", packed, "w13")


def test_a_changed_checkpoint_is_looked_at_again(csf, made, tmp_path) -> None:
    root = copy_of(made, tmp_path, "container")
    csf.inventory.take_inventory(checkpoint(csf, root))
    rewrite(root, drop(".weight"))
    with pytest.raises(csf.error):
        csf.inventory.take_inventory(checkpoint(csf, root))


def test_a_reload_from_another_folder_reads_that_folder(csf, made, tmp_path) -> None:
    other = tmp_path / "other"
    checkpoints.small(other / "source", num_hidden_layers=1)
    serve = checkpoints_csf.serving(
        checkpoints_csf.container(other / "source", other / "csf"), other / "serve"
    )
    name = "model.layers.1.mlp.experts.0.up_proj.weight_scale"  # that model's MTP layer
    assert weights(csf, serve, [0])[name].dtype == torch.float8_e4m3fn


def read_at(csf: Any, path: Any, model: Any, runner: str = "generate") -> Any:
    """The call of a reload, without taking a tensor."""
    from vllm.config.load import LoadConfig

    load = csf.loader.Nvfp4CsfModelLoader(
        LoadConfig(load_format="nvfp4_csf", use_tqdm_on_load=False)
    )
    config = SimpleNamespace(model=str(path), revision=None, runner_type=runner)
    return load.get_all_weights(config, model)


def served_model(csf: Any, made: Any) -> torch.nn.Module:
    """A model that was loaded from *made*'s serving folder, with the quantization config that vLLM gave its modules."""
    model = model_with(csf, [0, 1])
    for module in model.children():
        module.quant_config = SimpleNamespace(
            nvfp4_csf=csf.config.CsfCheckpoint(made.container, True, str(made.serve))
        )
    return model


def test_a_reload_from_no_csf_folder_is_refused_before_anything_is_touched(
    csf, made, tmp_path
) -> None:
    """Not answered with the tensors of the checkpoint that is served already."""
    model = served_model(csf, made)
    for path, words in (
        (made.source, "is an ordinary one"),
        (made.container, "this is a container: give the folder"),
        (tmp_path / "nowhere", "no folder on this machine"),
    ):
        with pytest.raises(ValueError, match=words) as caught:
            read_at(csf, path, model)
        assert str(path) in str(caught.value)


def test_a_config_that_is_not_in_config_json_counts_for_its_own_path(csf, made, tmp_path) -> None:
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    model = model_with(csf, [0, 1])
    model.layer0.quant_config = SimpleNamespace(
        nvfp4_csf=csf.config.CsfCheckpoint(made.container, True, str(folder))
    )
    assert dict(read_at(csf, folder, model))
    # A draft head of its own folder whose modules carry the target's config loads the ordinary way.
    head = tmp_path / "head"
    checkpoints.small(head, seed=5)
    found = dict(read_at(csf, head, model, "draft"))
    name = "model.layers.0.mlp.experts.0.up_proj.weight_scale"
    assert found[name].dtype == torch.float8_e4m3fn


def test_models_that_read_further_files_are_refused(csf, made) -> None:
    model = served_model(csf, made)
    model.secondary_weights = [object()]
    with pytest.raises(ValueError, match="Module reads further weight files"):
        read_at(csf, made.serve, model)


def test_streams_in_other_load_formats_are_refused(csf, made) -> None:
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    load = DefaultModelLoader(LoadConfig(load_format="safetensors", use_tqdm_on_load=False))
    config = SimpleNamespace(model=str(made.index), revision=None)
    with pytest.raises(
        ValueError,
        match="load format 'safetensors' would leave them out: add --load-format nvfp4_csf",
    ):
        list(load.get_all_weights(config, torch.nn.Module()))
    config.model = str(made.source)
    assert len(list(load.get_all_weights(config, torch.nn.Module()))) == len(made.tensors)


@pytest.mark.parametrize("first", ["fixed", "exceptions"])
def test_streams_join_in_any_order(csf, first: str) -> None:
    name = "model.layers.0.mlp.experts.0.up_proj.weight_scale"
    streams = codec.encode(np.full((32, 4), 0x38, np.uint8))
    pair = [
        (name + ".nvfp4_csf_fixed", torch.from_numpy(streams.fixed)),
        (name + ".nvfp4_csf_exceptions", torch.from_numpy(streams.exceptions)),
    ]
    if first == "exceptions":
        pair.reverse()
    other = ("lm_head.weight", torch.ones(1))
    place = csf.place(name, "/models/csf/tensors/a.safetensors", 100, 200)
    shapes = SimpleNamespace(shapes={name: (32, 4)}, places={name: place})
    join, wanted = csf.loader.join_streams, frozenset({(False, 0)})
    out = list(join(iter([pair[0], other, pair[1]]), shapes, wanted))
    assert [n for n, _ in out] == ["lm_head.weight", name]
    unpacked, came_from = csf.streams.unpack(out[1][1], "w13_weight_scale")
    assert (came_from, unpacked.name) == (place, name)
    assert unpacked.fixed.tobytes() == streams.fixed.tobytes()
    assert unpacked.exceptions.tobytes() == streams.exceptions.tobytes()
    with pytest.raises(ValueError, match="came without its other half"):
        list(join(iter(pair[:1]), shapes, wanted))
    with pytest.raises(ValueError, match="given twice"):
        list(join(iter([pair[0], pair[0]]), shapes, wanted))
    assert list(join(iter(pair), shapes, frozenset())) == []
