# SPDX-License-Identifier: Apache-2.0
"""Train any causal language model of transformers on a treebank with tree-planting.

    python training/train_tree_planting.py --config NAME_OR_FILE --output-dir FOLDER

The program is `hf_synlm.training.programs.train_tree_planting`; `synlm train` starts the same.
"""

from hf_synlm.training.programs.train_tree_planting import main

if __name__ == "__main__":
    main()
