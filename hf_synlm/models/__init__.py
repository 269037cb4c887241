"""One folder per architecture: configuration, models and their parts."""

ARCHITECTURES = ("gpst", "rnng", "tree_lm", "urnng", "pushdown", "on_lstm", "prpn", "palm", "ordered_memory", "lstm")
