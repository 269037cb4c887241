"""Publishing: `export` a model folder, `verify` it in a process without this package, write its `card`."""
