# SPDX-License-Identifier: Apache-2.0
"""Helpers shared by the tests: paths of the test environment, and stand-ins for what a CPU machine lacks.

In the pytest process (it imports the patched tree and the b12x that flashinfer-python bundles):

    from support import sm120
    sm120.install()            # before the first import of vllm; repeatable
    from support.moe_layer import make_layer

In a process of its own, with another tree, provider or environment variables, or for the real engine:

    from support.child import run_child
    result = run_child("rows.engine_cases:chunked_prefill", tree="stock", provider="b12x-pypi")

Import vllm and torch inside tests or fixtures, not at the top of a test module: collecting the tests of one part
then does not pay for vLLM's import (about ten seconds).
"""
