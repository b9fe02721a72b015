# SPDX-License-Identifier: Apache-2.0
"""The test environment: vLLM 0.33.0's Python code, both b12x providers and our patched tree, on any Linux machine."""
