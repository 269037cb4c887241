# SPDX-License-Identifier: Apache-2.0
"""Train an unsupervised recurrent neural network grammar (URNNG) on the words of a treebank.

    accelerate launch training/train_urnng.py --config NAME_OR_FILE --output-dir FOLDER

The program is `hf_synlm.training.programs.train_urnng`; `synlm train` starts the same.
"""

from hf_synlm.training.programs.train_urnng import main

if __name__ == "__main__":
    main()
