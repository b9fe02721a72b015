# SPDX-License-Identifier: Apache-2.0
"""The canonical-to-beta sync behind scripts/sync-beta."""
