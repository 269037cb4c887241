# SPDX-License-Identifier: Apache-2.0
"""ON-LSTM, ordered neurons (Shen et al., ICLR 2019), and ON-LSTM-SYD (Du et al., ACL 2020)."""
