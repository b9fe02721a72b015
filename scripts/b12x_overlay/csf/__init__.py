# SPDX-License-Identifier: Apache-2.0
"""scripts/convert-csf: ordinary NVFP4 checkpoints to CSF containers and back."""
