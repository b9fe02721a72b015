# SPDX-License-Identifier: Apache-2.0
"""vLLM's own OpenAI API server on CPU, with a tiny random dense Qwen3 and a byte-level tokenizer.

``python -m qualify.vllm_server FOLDER PORT [vllm options]`` makes the model in FOLDER if need be and serves it. All of
it is vLLM's real code but the compiled CPU operators (``support.cpu_ops``). They are installed on import, because the
engine process imports this module again.

An engine step takes at least STEP_SECONDS, about what a large model's takes on a GPU. Without that the tiny model makes
tokens faster than the API server can stream them: its event loop is then busy with the streams that run, and requests
that arrive later are not looked at for seconds.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support import cpu_ops

STEP_SECONDS = 0.03

cpu_ops.install()
_slot_mapping = torch.ops._C.compute_slot_mapping_kernel_impl


def _once_per_step(*args: Any, **kwargs: Any) -> Any:
    time.sleep(STEP_SECONDS)  # gives the core to the API server and to the client
    return _slot_mapping(*args, **kwargs)


torch.ops._C.compute_slot_mapping_kernel_impl = _once_per_step

TEMPLATE = (
    "{% for message in messages %}<|user|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(folder: Path) -> list[str]:
    """Write a tokenizer in which every byte is a token; returns the signs by token id."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    alphabet = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={sign: i for i, sign in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=special[0], additional_special_tokens=special[1:]
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return alphabet


def keep_ascii(lm_head: torch.Tensor, alphabet: list[str]) -> None:
    """Make printable ASCII the only likely tokens; *lm_head* is ``[vocabulary, H]``.

    vLLM holds back the chunk of a token that ends inside a UTF-8 character, and a random model may stay inside one for
    a second.
    """
    for token, sign in enumerate(alphabet):
        if len(sign) > 1 or not "!" <= sign <= "~":
            lm_head[token] = 0


def make_model(folder: Path) -> None:
    """A random one-layer model."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    alphabet = make_tokenizer(folder)
    config = Qwen3Config(
        vocab_size=len(alphabet), hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=8192,
        initializer_range=0.15, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).float()
    keep_ascii(model.lm_head.weight.data, alphabet)
    model.save_pretrained(folder)


def main(make: Callable[[Path], None] = make_model, dtype: str = "float32") -> None:
    folder, port, *options = sys.argv[1:]
    os.environ.update(
        VLLM_TARGET_DEVICE="cpu", VLLM_CPU_KVCACHE_SPACE="1",
        HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", OMP_NUM_THREADS="1", NUMBA_DISABLE_JIT="1", TRANSFORMERS_VERBOSITY="error",
    )  # fmt: skip
    if not (Path(folder) / "config.json").exists():
        make(Path(folder))
    sys.argv = [
        "vllm", "--model", folder, "--host", "127.0.0.1", "--port", port, "--enforce-eager", "--dtype", dtype,
        "--block-size", "32", "--max-model-len", "8192", "--max-num-seqs", "8", "--max-num-batched-tokens", "2048",
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes", *options,
    ]  # fmt: skip
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


if __name__ == "__main__":
    main()
