# SPDX-License-Identifier: Apache-2.0
"""What will work here: b12x provider, GPU, switches, flags and checkpoint, without importing vllm, torch or b12x.

Standard library only. The same modules run as ``scripts/doctor`` in a checkout and, packed into one file by
:mod:`b12x_overlay.image.programs`, as ``/opt/b12x-overlay/doctor`` in the image.
"""
