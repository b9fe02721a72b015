# SPDX-License-Identifier: Apache-2.0
"""scripts/qualify: measure an OpenAI-compatible server, compare two, and write a report.

One job per module: ``settings`` (the plan and the thresholds), ``schema`` (the result), ``address``/``client``/
``wire`` (HTTP), ``probe``/``identity`` (what the server is), ``prefill``/``decode``/``needle_run`` (measurements),
``runner``/``store`` (order, limits, resuming), ``statistics``/``lines``/``promises`` (verdicts), ``report``/``plots``.
"""
