# SPDX-License-Identifier: Apache-2.0
"""Publishing: `export` a model, `verify` it without this package, write its `card`; `info` and `checkpoint` read it."""
