# SPDX-License-Identifier: Apache-2.0
"""Plain torch versions of the compiled CPU operators that a small vLLM engine calls.

vLLM's CPU build has these in C++ (``csrc/cpu``); the wheel for CUDA does not. Signatures follow the calls in
``vllm/_custom_ops.py``, ``vllm/utils/cpu_triton_utils.py`` and ``vllm/v1``. Correct, not fast.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

_operators: dict[str, Any] = {}


def install() -> None:
    """Make the operators reachable as ``torch.ops._C.<name>``."""
    for name, function in _operators.items():
        setattr(torch.ops._C, name, function)


def _operator(function: Any) -> Any:
    _operators[function.__name__] = function
    return function


@_operator
def init_cpu_memory_env(nodes: Any) -> str:
    return ""


@_operator
def init_cpu_threads_env(ids: Any) -> str:
    return ""


@_operator
def cpu_attn_has_isa(name: str) -> bool:
    return False


@_operator
def get_scheduler_metadata(*args: Any) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int8)


@_operator
def greedy_argmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(dim=-1)


@_operator
def fused_gumbel_argmax(logits: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """Sample one token per row of *logits* [N, V] with the row's own seed."""
    tokens = torch.empty(len(logits), dtype=torch.long)
    for row, seed in enumerate(seeds.tolist()):
        generator = torch.Generator().manual_seed(seed)
        noise = torch.empty_like(logits[row]).exponential_(generator=generator)
        tokens[row] = (logits[row] - noise.log()).argmax()
    return tokens


@_operator
def compute_slot_mapping_kernel_impl(
    query_start_loc, positions, block_table, slot_mapping, block_size
) -> None:
    """Cache slot of every row: its request's block for the row's position, and the place in the block."""
    starts = query_start_loc.tolist()
    for request, (lo, hi) in enumerate(pairwise(starts)):
        position = positions[lo:hi].long()
        block = block_table[request].long()[position // block_size]
        slot_mapping[lo:hi] = (block * block_size + position % block_size).to(slot_mapping.dtype)


@_operator
def cpu_attn_reshape_and_cache(
    key, value, key_cache, value_cache, slot_mapping, *args: Any
) -> None:
    """Write K and V rows [N, heads, size] into the caches [blocks, heads, block size, size]; slot -1 is padding."""
    block_size = key_cache.shape[2]
    real = slot_mapping >= 0
    slots = slot_mapping[real].long()
    for rows, cache in ((key, key_cache), (value, value_cache)):
        cache[slots // block_size, :, slots % block_size] = rows[: len(real)][real].to(cache.dtype)


@_operator
def cpu_attention_with_kv_cache(
    query, key_cache, value_cache, output, query_start_loc, seq_lens, scale, causal, alibi, window, block_table,
    softcap, scheduler_metadata, s_aux, *args: Any,
) -> None:  # fmt: skip
    """Causal grouped-query attention over the paged cache, request by request."""
    if alibi is not None or s_aux is not None or softcap or window not in (-1, 0, None):
        raise NotImplementedError("the stand-in knows plain causal attention only")
    block_size = key_cache.shape[2]
    groups = query.shape[1] // key_cache.shape[1]
    starts = query_start_loc.tolist()
    for request, (lo, hi) in enumerate(pairwise(starts)):
        if lo == hi:
            continue
        length = int(seq_lens[request])
        blocks = block_table[request, : -(-length // block_size)].long()

        def context(cache: torch.Tensor, blocks=blocks, length=length) -> torch.Tensor:
            rows = cache[blocks].transpose(1, 2).flatten(0, 1)[:length]
            return rows.float().repeat_interleave(groups, dim=1)

        scores = torch.einsum("qhd,khd->hqk", query[lo:hi].float(), context(key_cache)) * scale
        if causal:
            last_seen = torch.arange(length - (hi - lo), length)[:, None]
            scores.masked_fill_(torch.arange(length)[None] > last_seen, float("-inf"))
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), context(value_cache))
        output[lo:hi].view(attended.shape).copy_(attended)


@_operator
def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox, *args: Any) -> None:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    rotated_query, rotated_key = RotaryEmbedding.forward_static(
        positions, query.clone(), None if key is None else key.clone(), head_size, cos_sin_cache.shape[-1],
        cos_sin_cache, is_neox,
    )  # fmt: skip
    query.copy_(rotated_query)
    if key is not None:
        key.copy_(rotated_key)


@_operator
def rejection_greedy_sample_kernel_impl(
    output_token_ids,
    cu_num_draft_tokens,
    draft_token_ids,
    target_argmax,
    bonus_token_ids,
    is_greedy,
    max_spec_len,
) -> None:
    """Accept drafts as long as they equal the target's argmax; write the first other token, or the bonus token."""
    lo = 0
    for request, hi in enumerate(cu_num_draft_tokens.tolist()):
        if is_greedy is None or bool(is_greedy[request]):
            for place, row in enumerate(range(lo, hi)):
                output_token_ids[request, place] = target_argmax[row]
                if draft_token_ids[row] != target_argmax[row]:
                    break
            else:
                output_token_ids[request, hi - lo] = bonus_token_ids.flatten()[request]
        lo = hi
