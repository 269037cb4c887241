# SPDX-License-Identifier: Apache-2.0
"""Count the n-grams of a text, as a baseline for language models: interpolated modified Kneser-Ney, orders 2 to 5.

    python training/train_ngram.py --train-trees A.txt --validation-words B.txt --tokenizer-name C --output-dir trigram
    synlm evaluate perplexity text.txt --model trigram

Text, tokens and options are those of `pretrain_gpst`; the n-grams consist of the tokenizer's pieces or words, inside
sentences. `output_dir` holds a model of transformers with exact next-token probabilities.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_synlm.data.shards import PreparedCorpus
from hf_synlm.evaluation.text.ngram import NGramForCausalLM
from hf_synlm.evaluation.text.perplexity import perplexity_of
from hf_synlm.training.arguments.base import parse_arguments
from hf_synlm.training.arguments.contexts import NGramArguments
from hf_synlm.training.engine.runner import end_counting, tells_errors
from hf_synlm.training.programs.prepare_text import prepare


def read_sentences(corpus: PreparedCorpus, begin_id: int, end_id: int, longest: int | None) -> tuple[Tensor, Tensor]:
    """All tokens [T] of the sentences, each between begin and end token, and the index of each in its sentence."""
    ids: list[np.ndarray] = []
    places: list[np.ndarray] = []
    for number in range(len(corpus.records)):
        shard = corpus.shard(number)
        for sentence in np.split(shard.input_ids, shard.sentence_ends[:-1].astype(int)):
            if longest is None or len(sentence) <= longest:
                ids.append(np.concatenate([[begin_id], sentence, [end_id]]))
                places.append(np.arange(len(sentence) + 2))
    if not ids:
        raise ValueError(f"All sentences are longer than --max-sentence-tokens {longest}. Raise this limit.")
    return torch.from_numpy(np.concatenate(ids)).long(), torch.from_numpy(np.concatenate(places))


def perplexity(model: NGramForCausalLM, ids: Tensor, places: Tensor) -> float:
    """Perplexity of the tokens of `read_sentences`, the ends among them."""
    nats = 0.0
    for sentence in ids.tensor_split((places == 0).nonzero().flatten()[1:]):
        logits = model(sentence[None]).logits[0, :-1]
        nats -= float(logits.gather(1, sentence[1:, None]).sum())
    return perplexity_of(nats / int((places > 0).sum()))


def run(arguments: NGramArguments) -> None:
    """Count, save the model with its tokenizer, and print what it makes of the validation text."""
    text = prepare(arguments, Path(arguments.output_dir) / "text")
    tokenizer = text.tokenizer
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    predicted = {tokenizer.eos_token_id, tokenizer.unk_token_id}
    special = sorted(set(tokenizer.all_special_ids) - predicted)
    read = partial(read_sentences, begin_id=ids["bos_token_id"], end_id=ids["eos_token_id"])
    tokens, places = read(text.train, longest=arguments.max_sentence_tokens)
    model = NGramForCausalLM.from_tokens(
        tokens, places, arguments.order, vocab_size=len(tokenizer), special_token_ids=special, **ids
    )
    model.save_pretrained(arguments.output_dir)
    tokenizer.save_pretrained(arguments.output_dir)
    counts = ", ".join(f"{count:,}" for count in model.config.num_ngrams)
    print(f"{text.describe()}\nn-grams of the orders 1 to {arguments.order}: {counts}")
    value = perplexity(model, *read(text.validation, longest=None))
    print(f"validation: perplexity of a token {value:.2f}, ends of sentences counted")
    end_counting(model, arguments.output_dir, {"validation": {"perplexity": value}})


def main(argv: Sequence[str] | None = None, parsed: Any = None) -> None:
    """Run the program with a command line (default: the process's), or with its arguments, `parsed`."""
    with tells_errors(argv):
        run(*(parsed or parse_arguments((NGramArguments,), argv, description="Count the n-grams of a text.")))


if __name__ == "__main__":
    main()
