"""Baselines without trees: LSTM and AWD-LSTM."""
