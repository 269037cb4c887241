# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a causal language model to summarize: XSum, CNN/DailyMail, Gigaword, or any table of texts and summaries.

    accelerate launch training/finetune_summarization.py --config NAME_OR_FILE --output-dir FOLDER

The program is `hf_synlm.training.programs.finetune_summarization`; `synlm train` starts the same.
"""

from hf_synlm.training.programs.finetune_summarization import main

if __name__ == "__main__":
    main()
