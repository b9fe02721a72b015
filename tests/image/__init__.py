# SPDX-License-Identifier: Apache-2.0
"""Tests of docker/, scripts/build-image and scripts/doctor."""
