# SPDX-License-Identifier: Apache-2.0
"""Pushdown Layers (Murty et al., EMNLP 2023)."""
