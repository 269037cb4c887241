# SPDX-License-Identifier: Apache-2.0
"""Tree LM and Transformer Grammars (Sartran et al., TACL 2022)."""
