# SPDX-License-Identifier: Apache-2.0
"""Neural PCFGs: probabilistic context-free grammars whose rules a network scores (Kim et al., ACL 2019, and others)."""
