# SPDX-License-Identifier: Apache-2.0
"""Baselines without trees: LSTM and AWD-LSTM."""
