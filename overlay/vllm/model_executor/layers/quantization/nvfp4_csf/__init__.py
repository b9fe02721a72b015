# SPDX-License-Identifier: Apache-2.0
"""NVFP4-CSF: E4M3 block scales of NVFP4 experts kept losslessly in about half their bytes.

This file imports nothing. ``arrays``, ``codec``, ``planes`` and ``container`` use only the standard library, numpy
and torch and import each other relatively, so that ``scripts/convert-csf`` loads the very same files on a machine
without vLLM (its module ``b12x_overlay.csf.core`` puts this package's parent folder on the path and imports it as
``nvfp4_csf``). Every other module of the package belongs to vLLM and is imported by its full name.
"""
