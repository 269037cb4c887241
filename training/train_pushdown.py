# SPDX-License-Identifier: Apache-2.0
"""Train Pushdown Layers on a treebank.

    python training/train_pushdown.py --config NAME_OR_FILE --output-dir FOLDER

The program is `hf_synlm.training.programs.train_pushdown`; `synlm train` starts the same.
"""

from hf_synlm.training.programs.train_pushdown import main

if __name__ == "__main__":
    main()
