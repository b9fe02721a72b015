# SPDX-License-Identifier: Apache-2.0
"""Release fragments: the folder changes/, its checks, the receipts of releases and the release notes."""
