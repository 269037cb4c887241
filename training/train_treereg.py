# SPDX-License-Identifier: Apache-2.0
"""Train any causal language model of transformers on a treebank with TreeReg.

    python training/train_treereg.py --config NAME_OR_FILE --output-dir FOLDER

The program is `hf_synlm.training.programs.train_treereg`; `synlm train` starts the same.
"""

from hf_synlm.training.programs.train_treereg import main

if __name__ == "__main__":
    main()
