# SPDX-License-Identifier: Apache-2.0
"""Scores of text: surprisal, perplexity, sums over given trees."""
