# SPDX-License-Identifier: Apache-2.0
"""RNNG, recurrent neural network grammars (Dyer et al., 2016; Noji and Oseki, 2021)."""
