# SPDX-License-Identifier: Apache-2.0
"""Count the n-grams of a text: the baseline of language models, interpolated modified Kneser-Ney.

    python training/train_ngram.py --train-files TEXT --tokenizer-name MODEL --order 3 --output-dir FOLDER

The program is `hf_synlm.training.programs.train_ngram`; `synlm train` starts the same.
"""

from hf_synlm.training.programs.train_ngram import main

if __name__ == "__main__":
    main()
