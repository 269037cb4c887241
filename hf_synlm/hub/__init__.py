"""Publishing: `export` a model, `verify` it without this package, write its `card`; `info` and `checkpoint` read it."""
