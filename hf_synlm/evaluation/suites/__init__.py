# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: SyntaxGym, BLiMP, GLUE, ROUGE, the lm-eval model."""
