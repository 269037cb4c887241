# SPDX-License-Identifier: Apache-2.0
"""URNNG, unsupervised recurrent neural network grammars (Kim et al., NAACL 2019)."""
