# SPDX-License-Identifier: Apache-2.0
"""Train a neural PCFG on the words of text or of treebanks.

    accelerate launch training/train_pcfg.py --config NAME_OR_FILE --output-dir FOLDER

The program is `hf_synlm.training.programs.train_pcfg`; `synlm train` starts the same.
"""

from hf_synlm.training.programs.train_pcfg import main

if __name__ == "__main__":
    main()
