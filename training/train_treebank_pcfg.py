# SPDX-License-Identifier: Apache-2.0
"""Count a PCFG in a treebank: rules by relative frequency, exact probabilities of next words, labeled trees.

    python training/train_treebank_pcfg.py --train-files TREES --validation-files TREES --output-dir FOLDER

The program is `hf_synlm.training.programs.train_treebank_pcfg`; `synlm train` starts the same.
"""

from hf_synlm.training.programs.train_treebank_pcfg import main

if __name__ == "__main__":
    main()
