# SPDX-License-Identifier: Apache-2.0
"""Runs the real b12x kernels and the vLLM engine on a Hopper GPU without network. For tests only, never shipped."""
