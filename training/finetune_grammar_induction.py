# SPDX-License-Identifier: Apache-2.0
"""Continue to train GPST on the sentences of a treebank, without its trees, and score the trees that it induces.

    accelerate launch training/finetune_grammar_induction.py --config NAME_OR_FILE --output-dir FOLDER

The program is `hf_synlm.training.programs.finetune_grammar_induction`; `synlm train` starts the same.
"""

from hf_synlm.training.programs.finetune_grammar_induction import main

if __name__ == "__main__":
    main()
