# SPDX-License-Identifier: Apache-2.0
"""The patch engine behind scripts/apply-patches.

patchset    the pin file and what it lists          tree, installed, wheel   where a patch set goes
diff        byte-exact unified diffs                transaction, lock        all or nothing on disk
hunks       exact application, search for drift     record                   RECORD rows of installed packages
manifest    the set's digest and its marker module  fetch, unpack            the pinned source distribution
state       what a tree holds, read from bytes      gitrepo, export, bump    maintainers' verbs
plan        bytes to write for apply and revert     report, cli              what the user sees

Everything but fetch, gitrepo and export needs only the standard library.
"""
