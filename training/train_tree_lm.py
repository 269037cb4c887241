# SPDX-License-Identifier: Apache-2.0
"""Train a Tree LM or a Transformer Grammar on a treebank.

    accelerate launch training/train_tree_lm.py --config NAME_OR_FILE --output-dir FOLDER

The program is `hf_synlm.training.programs.train_tree_lm`; `synlm train` starts the same.
"""

from hf_synlm.training.programs.train_tree_lm import main

if __name__ == "__main__":
    main()
