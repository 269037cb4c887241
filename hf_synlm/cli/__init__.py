# SPDX-License-Identifier: Apache-2.0
"""The `synlm` command: trees, surprisals, generation, evaluation and publishing from the command line.

Each command is a function of `trees.py`, `treebanks.py`, `evaluate.py` or `hub.py`: its parameters are the options, and
its docstring is the help. `app.py` lists the commands, and `options.py` holds what commands share. Everything
can be called from Python as well: `hf_synlm.evaluation`, `hf_synlm.conversion` and `hf_synlm.hub` compute what is
printed.
"""

from hf_synlm.cli.app import main

__all__ = ["main"]
