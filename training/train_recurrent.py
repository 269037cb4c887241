# SPDX-License-Identifier: Apache-2.0
"""Train ON-LSTM, PRPN, PaLM or AWD-LSTM as language models, with or without gold trees.

    accelerate launch training/train_recurrent.py --config NAME_OR_FILE --output-dir FOLDER

The program is `hf_synlm.training.programs.train_recurrent`; `synlm train` starts the same.
"""

from hf_synlm.training.programs.train_recurrent import main

if __name__ == "__main__":
    main()
