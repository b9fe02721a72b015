# SPDX-License-Identifier: Apache-2.0
"""The beta image: what goes into it, what it says about itself, how it is built and verified.

In the image, standard library only: expected, integrity, verify, manifest, content, programs, install.
Outside: plan, engines, registry, receipt, sbom, build.
"""
