# SPDX-License-Identifier: Apache-2.0
"""hf_synlm: syntactic language models for Hugging Face, which write a sentence together with its parse tree.

Importing the package registers its architectures with the Auto classes of transformers, and makes `save_pretrained`
and `push_to_hub` write repositories that load without the package.
"""

import sys

__version__ = "0.2.0.dev0"

# Models need torch and transformers, which take seconds to import. The command `synlm` imports them when it needs them.
if "synlm" not in sys.modules:
    from hf_synlm.evaluation.text.surprisal import surprisal
    from hf_synlm.evaluation.trees.consensus import average_trees
    from hf_synlm.evaluation.trees.treebank_parsing import parse_sentences
    from hf_synlm.hub import architectures
    from hf_synlm.hub.architectures import *  # noqa: F403  # the names of its __all__

    __all__ = [*architectures.__all__, "average_trees", "parse_sentences", "surprisal"]
else:

    def __getattr__(name: str) -> object:
        from hf_synlm.evaluation.text.surprisal import surprisal
        from hf_synlm.evaluation.trees.consensus import average_trees
        from hf_synlm.evaluation.trees.treebank_parsing import parse_sentences
        from hf_synlm.hub import architectures

        if name in (calls := dict(average_trees=average_trees, parse_sentences=parse_sentences, surprisal=surprisal)):
            return calls[name]
        if name not in architectures.__all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(architectures, name)
