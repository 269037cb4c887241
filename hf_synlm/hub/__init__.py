"""Publishing: `export` a model, `verify` it in a process without this package, write its `card`; `info`, `checkpoint`."""
