# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a model on a task of GLUE, or on any table of labeled texts.

    accelerate launch training/finetune_glue.py --config NAME_OR_FILE --output-dir FOLDER

The program is `hf_synlm.training.programs.finetune_glue`; `synlm train` starts the same.
"""

from hf_synlm.training.programs.finetune_glue import main

if __name__ == "__main__":
    main()
