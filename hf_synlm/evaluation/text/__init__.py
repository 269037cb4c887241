"""Scores of text: surprisal, perplexity, sums over given trees."""
