# SPDX-License-Identifier: Apache-2.0
"""The overlay's framework-free CSF modules, importable without vLLM.

Codec and container reader exist once, in the package that is copied into vLLM. Importing it as
``vllm...nvfp4_csf`` would import vLLM and torch, so its parent folder goes on the path instead and the package is
imported by its short name.
"""

from __future__ import annotations

import sys

from b12x_overlay.paths import OVERLAY

_PARENT = OVERLAY / "vllm" / "model_executor" / "layers" / "quantization"
if str(_PARENT) not in sys.path:
    sys.path.append(str(_PARENT))

from nvfp4_csf import codec, container, experts, shards  # noqa: E402
from nvfp4_csf.codec import CODEC, CsfStreamError, CsfStreams  # noqa: E402
from nvfp4_csf.container import Container, ContainerError, Location, ShardRecord  # noqa: E402
from nvfp4_csf.shards import Entry, ShardError, ShardHeader  # noqa: E402
from nvfp4_csf.sizes import readable  # noqa: E402

__all__ = [
    "CODEC",
    "Container",
    "ContainerError",
    "CsfStreamError",
    "CsfStreams",
    "Entry",
    "Location",
    "ShardError",
    "ShardHeader",
    "ShardRecord",
    "codec",
    "container",
    "experts",
    "readable",
    "shards",
]
