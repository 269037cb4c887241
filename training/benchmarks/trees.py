"""Transformers over trees, and a loss on trees, against GPT-2 of the same size on as many tokens.

The sentences and trees are those of the embedded treebank. There is no dropout on either side.
"""

from types import SimpleNamespace

import torch
from benchmarks.gpst import gpt2
from benchmarks.rnng import TRAIN_LENGTHS, read_embedded_trees
from benchmarks.sides import Sides, check_gradients, place, training_step
from torch import Tensor
from transformers import GPT2LMHeadModel

from hf_synlm import PushdownConfig, PushdownForCausalLM, TreeLMConfig, TreeLMForCausalLM
from hf_synlm.data.collate import collate_trees
from hf_synlm.data.vocabulary import word_tokenizer
from hf_synlm.models.rnng.actions import TransitionSystem
from hf_synlm.models.tree_lm.linearization import linearize
from hf_synlm.training.programs.train_pushdown import AttachmentCollator
from hf_synlm.training.tasks.treereg import TreeRegArguments, TreeRegCollator, encode_sentence, tree_regularization_loss

NUM_SENTENCES, VOCAB_SIZE, WIDTH, LAYERS, HEADS = 32, 5400, 256, 4, 4
SIZES = {
    "vocab_size": VOCAB_SIZE, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "intermediate_size": 4 * WIDTH, "dropout": 0.0,
}  # fmt: skip


def _gpt2(vocab_size: int = VOCAB_SIZE, layers: int = LAYERS) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {**SIZES, "vocab_size": vocab_size, "num_hidden_layers": layers}
    config = SimpleNamespace(**sizes, max_position_embeddings=512, pad_token_id=None)
    return place(gpt2(config).train())


def _compare(
    model: PushdownForCausalLM | TreeLMForCausalLM, batch: dict[str, Tensor], baseline: GPT2LMHeadModel, ids: Tensor
) -> Sides:
    """Training step on given trees against GPT-2 on `ids`; the check: a sentence has the probability it has alone."""
    ours = training_step(model, lambda: model(**batch).loss)
    theirs = training_step(baseline, lambda: baseline(ids, labels=ids).loss)

    def check() -> None:
        with torch.no_grad():
            alone = [model(**{name: rows[k : k + 1] for name, rows in batch.items()}).joint_log_prob for k in range(4)]
            torch.testing.assert_close(model(**batch).joint_log_prob[:4], torch.cat(alone), rtol=1e-5, atol=1e-3)
        ours()
        check_gradients(model)

    return Sides(ours, theirs, check, model)


def pushdown_train(layers: int = LAYERS) -> Sides:
    """Pushdown Layers with gold attachments against GPT-2 on the same tokens.

    Args:
        layers: of GPT-2. With as many as Pushdown Layers it lacks the parameters of the attachment head.

    Returns:
        Both sides.
    """
    config = PushdownConfig(**SIZES)
    _, labels, rows = read_embedded_trees(TRAIN_LENGTHS, NUM_SENTENCES)
    collator = AttachmentCollator(config.pad_token_id, config.closing, TransitionSystem("top_down", len(labels)))
    batch = place({name: value for name, value in collator(rows).items() if name != "num_words"})
    torch.manual_seed(0)
    model = place(PushdownForCausalLM(config).train())
    begin = torch.full_like(batch["input_ids"][:, :1], config.bos_token_id)
    return _compare(model, batch, _gpt2(layers=layers), torch.cat([begin, batch["input_ids"]], 1))


def transformer_grammar_train() -> Sides:
    """Transformer Grammar against GPT-2 on as many tokens: words, labels, and the second copies of closing labels."""
    _, labels, rows = read_embedded_trees(TRAIN_LENGTHS, NUM_SENTENCES)
    batch = place(collate_trees(rows, 0))
    torch.manual_seed(0)
    config = TreeLMConfig(nonterminals=labels, structure_attention="stack_compose", **SIZES)
    model = place(TreeLMForCausalLM(config).train())
    baseline = _gpt2(VOCAB_SIZE + 2 * len(labels))
    return _compare(model, batch, baseline, linearize(batch["actions"], batch["input_ids"], config).tokens)


def treereg_train() -> Sides:
    """GPT-2 with the loss of TreeReg against the same step without it."""
    sentences, _, _ = read_embedded_trees(TRAIN_LENGTHS, NUM_SENTENCES)
    tokenizer = word_tokenizer([sentence.words for sentence in sentences], min_count=1, end_token=True)
    rows = [encode_sentence(tokenizer, sentence.words, sentence.spans) for sentence in sentences]
    batch = place(TreeRegCollator(0)(rows))
    trees = {name: batch.pop(name) for name in ("word_spans", "splits")}
    model, treereg = _gpt2(), TreeRegArguments()

    def loss() -> Tensor:
        output = model(**batch, output_hidden_states=True)
        return output.loss + tree_regularization_loss(treereg.vectors(output.hidden_states), **trees)

    ours = training_step(model, loss)
    theirs = training_step(model, lambda: model(**batch).loss)

    def check() -> None:
        with torch.no_grad():
            added = loss() - model(**batch).loss
        assert torch.isfinite(added) and added > 0
        ours()
        check_gradients(model)

    return Sides(ours, theirs, check, model)
