# SPDX-License-Identifier: Apache-2.0
"""A4 prefill by row type for the b12x NVFP4 experts.

Prefill rows of a step run with NVFP4 activations (A4), every other row W4A16, over one copy of the expert weights.
This package holds the decisions and the bookkeeping; the patch of ``fused_moe/b12x.py`` only calls into it.
"""
