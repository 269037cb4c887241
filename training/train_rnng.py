# SPDX-License-Identifier: Apache-2.0
"""Train RNNG on a treebank, or the LSTM language model on the words of the same treebank.

    accelerate launch training/train_rnng.py --config NAME_OR_FILE --output-dir FOLDER

The program is `hf_synlm.training.programs.train_rnng`; `synlm train` starts the same.
"""

from hf_synlm.training.programs.train_rnng import main

if __name__ == "__main__":
    main()
