# SPDX-License-Identifier: Apache-2.0
"""Ordered Memory (Shen et al., NeurIPS 2019)."""
