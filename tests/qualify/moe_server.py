# SPDX-License-Identifier: Apache-2.0
"""As ``qualify.vllm_server`` with a tiny calibrated NVFP4 Qwen3-MoE on the b12x backend; b12x is the reference.

``python -m qualify.moe_server FOLDER PORT [vllm options]``. What arms A4 prefill comes from the environment.
"""

from __future__ import annotations

import os
from pathlib import Path

from qualify import vllm_server
from support import cpu_engine

cpu_engine.start_with_reference()  # on import, as the engine process imports this module again
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"


def make_model(folder: Path) -> None:
    from csf import checkpoints
    from safetensors.torch import load_file, save_file

    made = folder.parent / f"{folder.name}.made"
    alphabet = vllm_server.make_tokenizer(made.with_suffix(".tokenizer"))
    checkpoints.write(made, mtp_layer=False, vocab_size=len(alphabet), max_position_embeddings=8192)
    for shard in made.glob("*.safetensors"):
        tensors = load_file(shard)
        if "lm_head.weight" in tensors:
            vllm_server.keep_ascii(tensors["lm_head.weight"], alphabet)
            save_file(tensors, shard)
    for file in made.with_suffix(".tokenizer").iterdir():
        file.rename(made / file.name)
    made.rename(folder)


if __name__ == "__main__":
    vllm_server.main(make_model, "bfloat16")
