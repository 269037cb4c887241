# SPDX-License-Identifier: Apache-2.0
"""What a user gets: the saved folder with and without hf_synlm, its trees of held-out sentences, and a sentence."""

from pathlib import Path
from typing import Any

from transformers import set_seed

from hf_synlm.data.text import plural
from hf_synlm.evaluation.generation import generate_texts
from hf_synlm.evaluation.trees.gold_treebank import Treebank, score_baselines, score_numbers, score_table, score_trees
from hf_synlm.evaluation.trees.treebank_parsing import parse_words
from hf_synlm.hub.loading import load_pretrained
from hf_synlm.hub.verify import verify_export
from hf_synlm.viz import SentenceView

REPORT_REMEDY = "keep it by --report-punctuation keep"


def report_saved_model(
    folder: Path, banks: dict[str, Treebank], methods: dict[str, Any], seed: int, convention: str, backbone: str | None
) -> dict[str, Any]:
    """Print whether a saved model needs this package, the scores of its trees by method of `parse`, and a sentence.

    Returns for JSON: `verified`; `trees`, by name of the treebank the convention and the scores, the model's first;
    `generated`, the text of the sentence. `backbone` is that of an adapter.
    """
    first = next(iter(banks.values())).words
    verified = verify_export(folder, texts=[" ".join(words) for words in first[:2]], backbone=backbone)
    print(f"{verified.table()}\nThe saved model parses {plural(len(first), 'test sentence')}:")
    model, tokenizer = load_pretrained(str(folder), backbone=backbone)
    report: dict[str, Any] = {}
    for name, bank in banks.items():
        trees = {kind: parse_words(model, tokenizer, bank.words, **options) for kind, options in methods.items()}
        scores = {kind: score_trees(found, bank, convention) for kind, found in trees.items()}
        used = next(iter(scores.values())).convention
        scores |= score_baselines(bank, convention)
        print(score_table(scores, bank))
        report[name] = {"convention": used, "sentence_and_corpus_f1": score_numbers(scores)}
    set_seed(seed)
    (generated,) = generate_texts(
        model, tokenizer, [first[0][0]], tokenize="words", max_new_tokens=14, do_sample=True, top_k=20
    )
    print(f"generated: {generated.text}")
    if generated.tree.hypotheses:
        print(SentenceView(generated.tree).text())
    return {"verified": verified.passed, "trees": report, "generated": generated.text}
