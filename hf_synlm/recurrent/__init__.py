# SPDX-License-Identifier: Apache-2.0
"""What ON-LSTM, PRPN, PaLM, Ordered Memory and LSTM share: language model, cache, syntactic distances."""
