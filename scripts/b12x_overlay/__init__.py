# SPDX-License-Identifier: Apache-2.0
"""The modules behind the commands in scripts/."""
