# SPDX-License-Identifier: Apache-2.0
"""Proves docker/Dockerfile and scripts/build-image without a Docker engine: buildah, runc and a stand-in base.

The stand-in is a small Debian with the real vllm 0.33.0 wheel, installed by uv as upstream's image has it. It has
neither torch nor a GPU: what is shown is how the image is put together and checked, not that it serves.
"""
