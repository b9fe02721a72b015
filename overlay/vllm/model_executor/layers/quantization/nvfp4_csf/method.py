# SPDX-License-Identifier: Apache-2.0
"""The two quantisation methods: scales from a CSF checkpoint, and scales compressed while they load.

Both are vLLM's `ModelOptNvFp4FusedMoE` with the block scales taken out: the weights are prepared as upstream prepares
them for W4A16 (up rows first, halves padded to 64), the scales become planes, and the experts are given the model's
shared scratch as block scales under a dual plan, which reads them where they are (a W4A16-only plan would copy their
values at load). vLLM looks for "ModelOpt" in the class name when it loads scales, hence the names.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.b12x_a4.arming import arm_layer
from vllm.model_executor.layers.fused_moe.b12x_a4.dual_plan import ATTRIBUTE as DUAL_PLAN
from vllm.model_executor.layers.fused_moe.b12x_a4.dual_plan import DualPlan, set_dual_plan
from vllm.model_executor.layers.fused_moe.b12x_a4.settings import KEEP_PACKED
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4FusedMoE
from vllm.model_executor.layers.quantization.nvfp4_csf.arrivals import Arrivals
from vllm.model_executor.layers.quantization.nvfp4_csf.encoder import encode
from vllm.model_executor.layers.quantization.nvfp4_csf.layer import ATTRIBUTE, CsfLayer
from vllm.model_executor.layers.quantization.nvfp4_csf.owner import current_owner
from vllm.model_executor.layers.quantization.nvfp4_csf.planes import ScalePlanes
from vllm.model_executor.layers.quantization.nvfp4_csf.preparation import (
    Prepared,
    check_global_scales,
    constant_planes,
    prepare_weights,
)
from vllm.model_executor.layers.quantization.nvfp4_csf.refusals import (
    refuse_configuration,
    refuse_layer,
)
from vllm.model_executor.layers.quantization.nvfp4_csf.scratch import (
    ScratchParameter,
    refuse_state_dict,
)
from vllm.model_executor.layers.quantization.nvfp4_csf.settings import get_settings
from vllm.model_executor.layers.quantization.nvfp4_csf.streams_loader import SHARDS, RankStreams
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.utils import replace_parameter
from vllm.v1.worker.moe_row_types import note_armed_layer

logger = init_logger(__name__)

_DONE = "_already_called_process_weights_after_loading"
_SCALES = ("w13_weight_scale", "w2_weight_scale")


class CsfModelOptNvFp4FusedMoE(ModelOptNvFp4FusedMoE):
    """What both ways share. Everything that is not about block scales is the parent's."""

    supports_pre_processed_weights = False
    from_streams = False

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """As the parent's, on the meta device: no plain scales of a whole model ever exist.

        Raises:
            ValueError: a set-up that NVFP4-CSF does not support; see `refusals`.
        """
        refuse_configuration(self.from_streams)
        refuse_layer(self, layer)
        setattr(layer, ATTRIBUTE, CsfLayer(current_owner(), layer.layer_name))
        layer.register_state_dict_pre_hook(refuse_state_dict)
        with torch.device("meta"):
            super().create_weights(layer, *args, **kwargs)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Turn the loaded tensors into prepared experts over the shared scratch.

        Raises:
            ValueError: tensors that are missing, global scales that are zero, negative or not finite; named.
            RuntimeError: a reload that does not fit the first load's planes.
        """
        if getattr(layer, _DONE, False):
            return
        self._check_complete(layer)
        check_global_scales(layer)
        arm_layer(self, layer)
        prepared = self._prepare(layer)
        csf: CsfLayer = getattr(layer, ATTRIBUTE)
        csf.set_planes(*self._planes(layer, prepared))
        for name, scratch, planes in zip(_SCALES, csf.scratch, csf.planes, strict=True):
            _point_at(layer, name, scratch, planes)
        replace_parameter(layer, "w13_weight", prepared.w13)
        replace_parameter(layer, "w2_weight", prepared.w2)
        replace_parameter(layer, "w13_weight_scale_2", layer.w13_weight_scale_2[:, 0].contiguous())
        _use_dual_plan(layer, csf)
        self._build_moe_kernel(layer)
        setattr(layer, _DONE, True)

    def _check_complete(self, layer: Any) -> None:
        """Look at whether all of *layer*'s tensors have come. CSF checkpoints are looked at before they load."""

    @abstractmethod
    def _prepare(self, layer: Any) -> Prepared:
        """*layer*'s weights as the dual plan wants them."""

    @abstractmethod
    def _planes(self, layer: Any, prepared: Prepared) -> tuple[ScalePlanes, ScalePlanes]:
        """The compressed scales of w13 and w2 on *layer*'s device."""


class CsfCompressingModelOptNvFp4FusedMoE(CsfModelOptNvFp4FusedMoE):
    """Ordinary checkpoint: a layer's plain scales live from its last tensor's arrival until they are encoded."""

    uses_meta_device = True

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        if self.use_a16:
            # A weight-only checkpoint has none; waiting for them would keep every layer's tensors until the end.
            for name in ("w13_input_scale", "w2_input_scale"):
                getattr(layer, name).weight_loader_numel = 0
        layer.nvfp4_csf_arrivals = Arrivals(layer)
        initialize_online_processing(layer)

    def _check_complete(self, layer: Any) -> None:
        if not _loads_dummies():
            layer.nvfp4_csf_arrivals.check()

    def _prepare(self, layer: Any) -> Prepared:
        return prepare_weights(
            layer.w13_weight, layer.w13_weight_scale, layer.w2_weight, layer.w2_weight_scale
        )

    def _planes(self, layer: Any, prepared: Prepared) -> tuple[ScalePlanes, ScalePlanes]:
        return encode(prepared.w13_scale.contiguous()), encode(prepared.w2_scale.contiguous())


class CsfStreamsModelOptNvFp4FusedMoE(CsfModelOptNvFp4FusedMoE):
    """CSF checkpoint: streams arrive packed (`streams_loader`), plain scales never exist.

    The scale parameters hold one byte per expert and projection, set when its streams have come; vLLM's reload
    counts these bytes like loaded elements and so knows when the layer is complete.
    """

    from_streams = True

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        device = torch.get_default_device()
        moe = layer.moe_config
        streams = RankStreams(
            moe.num_local_experts,
            moe.hidden_dim,
            moe.intermediate_size,
            moe.moe_parallel_config.tp_rank,
            moe.moe_parallel_config.tp_size,
        )
        layer.nvfp4_csf_streams = streams
        for name, parameter in list(layer.named_parameters(recurse=False)):
            if name in _SCALES:
                delattr(layer, name)
                shape = (streams.experts, 2 if name == "w13_weight_scale" else 1)
                arrived = torch.nn.Parameter(
                    torch.zeros(shape, dtype=torch.uint8), requires_grad=False
                )
                arrived.weight_loader = _stream_loader(layer)
                arrived.value_until_loaded = 0
                layer.register_parameter(name, arrived)
            elif parameter.is_meta:
                with device:
                    setattr(layer, name, materialize_meta_tensor(parameter))

    def _prepare(self, layer: Any) -> Prepared:
        return prepare_weights(layer.w13_weight, None, layer.w2_weight, None)

    def _planes(self, layer: Any, prepared: Prepared) -> tuple[ScalePlanes, ScalePlanes]:
        streams: RankStreams = layer.nvfp4_csf_streams
        missing = streams.missing()
        device = prepared.w13.device
        if not missing:
            return streams.planes(device)
        if _loads_dummies():
            return constant_planes(prepared, device)
        raise ValueError(
            f"{layer.layer_name}: missing CSF tensors: the scales of {len(missing)} projections did not come, first "
            f"expert/shard {missing[0]}"
        )


def _loads_dummies() -> bool:
    config = get_current_vllm_config_or_none()
    return config is not None and config.load_config.load_format == "dummy"


def for_layer(method: Any, quant_config: Any, prefix: str) -> Any:
    """The method for one MoE layer: *method*, which upstream chose, or its CSF form.

    Raises:
        ValueError: the layer's scales are compressed and *method* is not NVFP4's.
    """
    from vllm.model_executor.layers.quantization.nvfp4_csf.config import checkpoint_of
    from vllm.model_executor.layers.quantization.nvfp4_csf.inventory import (
        layer_key,
        take_inventory,
    )

    checkpoint = checkpoint_of(quant_config)
    is_nvfp4 = type(method) is ModelOptNvFp4FusedMoE
    if checkpoint is not None:
        if layer_key(prefix) not in take_inventory(checkpoint).layers:
            return method
        if not is_nvfp4:
            raise ValueError(
                f"{prefix}: its scales are compressed and {type(method).__name__} cannot use them: serve the ordinary "
                "checkpoint, without --quantization overrides."
            )
        made: type[CsfModelOptNvFp4FusedMoE] = CsfStreamsModelOptNvFp4FusedMoE
    elif get_settings().compress and is_nvfp4 and not current_owner().is_draft:
        # A draft model has a layer or two: a scratch of its own would take more than compression gives.
        made = CsfCompressingModelOptNvFp4FusedMoE
    else:
        return method
    return made(quant_config=method.quant_config, moe_config=method.moe)


def _stream_loader(layer: Any) -> Any:
    """Weight loader of the scale parameters of *layer*, in the form in which vLLM's models call it."""
    reference = weakref.ref(layer)

    def load_streams(
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        owner = reference()
        assert owner is not None
        if shard_id not in SHARDS:
            raise ValueError(f"{weight_name}: unknown shard {shard_id!r}")
        local = owner._map_global_expert_id_to_local_expert_id(expert_id)
        owner.nvfp4_csf_streams.add(local, shard_id, loaded_weight, weight_name)
        column = 1 if shard_id == "w3" else 0
        param.data[local, column].copy_(torch.ones((), dtype=torch.uint8))
        return True if return_success else None

    return load_streams


def _point_at(layer: Any, name: str, scratch: torch.Tensor, planes: ScalePlanes) -> None:
    # Not replace_parameter: where shapes match it copies into the old parameter, and the experts would read that.
    old = getattr(layer, name)
    new = ScratchParameter(scratch, requires_grad=False)
    new.planes = planes
    new.weight_loader = old.weight_loader
    setattr(layer, name, new)


def _use_dual_plan(layer: Any, csf: CsfLayer) -> None:
    armed: DualPlan | None = getattr(layer, DUAL_PLAN, None)
    scales = armed.scales if armed is not None else None
    if armed is not None and armed.keep_packed:
        logger.warning_once(
            "%s has no effect: packed weights would hold plain scales.", KEEP_PACKED
        )
    set_dual_plan(layer, DualPlan(csf.name, scales, external_block_scales=True, hooks=csf))
    if get_settings().prefetch:
        note_armed_layer(runs_a4=False)  # the prefetch runs in steps with prefill rows only
