# SPDX-License-Identifier: Apache-2.0
"""One folder per architecture: configuration, models and their parts."""

ARCHITECTURES = (
    "gpst", "rnng", "tree_lm", "urnng", "pushdown", "pcfg", "on_lstm", "prpn", "palm", "ordered_memory", "lstm",
    "span_parser",
)  # fmt: skip
