"""The `synlm` command: trees, surprisals, generation, evaluation and publishing from the command line.

Every command is a module of this folder with a function `command`, whose signature and docstring are its options and
its help; `app.py` lists them. Options that commands share are in `options.py`. What a command computes is in
`hf_synlm.evaluation`, `hf_synlm.conversion` and `hf_synlm.hub`, so that everything can be called from Python as well.
"""

from hf_synlm.cli.app import main

__all__ = ["main"]
