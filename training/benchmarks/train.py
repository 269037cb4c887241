# SPDX-License-Identifier: Apache-2.0
"""Training steps: GPST and the Transformers over trees against GPT-2, RNNG and the recurrent models against LSTMs.

Trees are those of the embedded treebank, so that depth, width and length are real.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from benchmarks.sides import Sides, compare_training, place
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import hf_synlm
from hf_synlm.core.cache import CACHE
from hf_synlm.data.collate import collate_trees
from hf_synlm.data.gold_trees import encode_trees, label_inventory
from hf_synlm.data.samples import sample_path
from hf_synlm.data.treebank import TreebankSentence, read_treebank
from hf_synlm.data.vocabulary import word_tokenizer
from hf_synlm.models.tree_lm.linearization import linearize
from hf_synlm.training.programs.train_pushdown import AttachmentCollator
from hf_synlm.training.tasks.tree_batches import TreeCollator
from hf_synlm.trees.transitions import TransitionSystem

SENTENCE_LENGTHS = (8, 45)  # tokens per sentence of the training contexts, half-open
QUARTER = {
    "vocab_size": 12566, "hidden_size": 192, "num_attention_heads": 4, "composition_size": 64,
    "composition_num_heads": 4, "composition_intermediate_size": 256, "score_size": 32, "parser_size": 32,
    "parser_score_size": 128, "parser_num_heads": 4, "max_position_embeddings": 1024, "bos_token_id": 1,
    "eos_token_id": 1, "pad_token_id": 2, "reduce_token_id": 3, "cls_token_id": 4, "sep_token_id": 5,
}  # fmt: skip
FIRST_WORD = 10  # smaller ids may be special tokens
STEPWISE_TOKENS = 5  # that the check of recurrent models reads one by one, in two rows
TREE_SIZES = {"vocab_size": 5400, "embedding_size": 256, "hidden_size": 256, "num_layers": 2, "dropout": 0.0}
TRAIN_LENGTHS = range(16, 23)  # words per sentence
NUM_SENTENCES, VOCAB_SIZE, WIDTH, LAYERS, HEADS = 32, 5400, 256, 4, 4
SIZES = {
    "vocab_size": VOCAB_SIZE, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "intermediate_size": 4 * WIDTH, "dropout": 0.0,
}  # fmt: skip


def without_dropout(config_class: Any, preset: str) -> dict[str, float]:
    """Fields of a configuration that switch off its dropout."""
    return {name: 0.0 for name in vars(config_class.from_preset(preset)) if name.endswith("dropout")}


NO_DROPOUT = without_dropout(hf_synlm.GPSTConfig, "gpst-small")


# ------------------------------------------------------------------------------------------ GPST
def gpt2(config: Any) -> GPT2LMHeadModel:
    """GPT-2 of transformers with the width, heads, layers, positions and tokens of a configuration."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.max_position_embeddings,
            n_embd=config.hidden_size,
            n_layer=config.num_hidden_layers,
            n_head=config.num_attention_heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=None,
            pad_token_id=config.pad_token_id,
        )
    )


def packed_contexts(num_contexts: int, num_tokens: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Full contexts of random tokens, cut into sentences of random length."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(FIRST_WORD, vocab_size, (num_contexts, num_tokens), generator=generator)
    sentence_ids = torch.zeros_like(ids)
    for row in sentence_ids:
        start, number = 0, 1
        while start < num_tokens:
            length = int(torch.randint(*SENTENCE_LENGTHS, (1,), generator=generator))
            row[start : start + length] = number
            start, number = start + length, number + 1
    return ids, sentence_ids


def gpst_train(overrides: dict, num_contexts: int, num_tokens: int) -> Sides:
    """Forward and backward of the whole objective against GPT-2's language-modeling loss on the same tokens."""
    torch.manual_seed(0)
    config = hf_synlm.GPSTConfig(**overrides, **NO_DROPOUT, merge_noise=0.0)
    model, baseline = place(hf_synlm.GPSTForCausalLM(config).train()), place(gpt2(config).train())
    ids, sentence_ids = (place(x) for x in packed_contexts(num_contexts, num_tokens, config.vocab_size))

    def loss() -> Tensor:
        return model(ids, sentence_ids=sentence_ids, labels=ids).loss

    def check() -> None:
        # Compute the token loss again from full logits, and the tree of the first sentence in a context without others.
        model.eval()
        output = model(ids, sentence_ids=sentence_ids, labels=ids)
        with torch.no_grad():
            given = model(ids, sentence_ids=sentence_ids, output_chart=True, output_spans=True)
            log_prob = given.token_logits_given_tree.log_softmax(-1).gather(-1, ids[..., None])
        torch.testing.assert_close(output.losses["token"], -log_prob.mean(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(output.joint_log_prob, given.joint_log_prob, rtol=1e-4, atol=1e-2)
        first = ids[:1, : int((sentence_ids[0] == 1).sum())]
        alone = [span for span in given.spans[0] if span[1] <= first.shape[1]]
        with torch.no_grad():
            single = model(first, output_chart=True, output_spans=True)
        if single.spans[0] != alone:
            raise AssertionError("a sentence has another tree alone than in its context")
        model.train()

    return compare_training(model, loss, baseline, lambda: baseline(ids, labels=ids).loss, check)


# ------------------------------------------------------------------------------------------ RNNG
def treebank() -> tuple[list[TreebankSentence], tuple[str, ...], list[dict]]:
    """Sentences, labels, and encoded trees of the embedded treebank."""
    sentences = list(read_treebank(sample_path("trees.train.txt")))
    labels = label_inventory(sentences)
    tokenizer = word_tokenizer([sentence.words for sentence in sentences], unknown="berkeley")
    return sentences, labels, encode_trees(sentences, tokenizer, TransitionSystem("top_down", len(labels)), labels)


def read_embedded_trees(
    lengths: range, num_sentences: int
) -> tuple[list[TreebankSentence], tuple[str, ...], list[dict]]:
    """The first sentences of the embedded treebank with so many words: sentences, labels, and encoded trees."""
    sentences, labels, trees = treebank()
    chosen = [k for k, sentence in enumerate(sentences) if len(sentence.words) in lengths][:num_sentences]
    return [sentences[k] for k in chosen], labels, [trees[k] for k in chosen]


def rnng_train(num_sentences: int) -> Sides:
    """Forward and backward of the training objective against an LSTM over as many steps as there are pushes.

    Every action of the top-down system pushes one element: an open nonterminal, a word, or a constituent. The plan of
    the derivations is made before, as loader workers do in training. The LSTM has no embedding, no output layer and no
    composition.
    """
    _, labels, chosen = read_embedded_trees(TRAIN_LENGTHS, num_sentences)
    config = hf_synlm.RNNGConfig(nonterminals=labels, **TREE_SIZES)
    batch = TreeCollator(0, config)(chosen)
    del batch["num_words"]
    batch = place(batch)
    torch.manual_seed(0)
    model = place(hf_synlm.RNNGForCausalLM(config).train())
    lstm = place(
        nn.LSTM(TREE_SIZES["embedding_size"], TREE_SIZES["hidden_size"], TREE_SIZES["num_layers"], batch_first=True)
    )
    pushes = sum(len(tree["actions"]) for tree in chosen)
    inputs = place(torch.randn(num_sentences, -(-pushes // num_sentences), TREE_SIZES["embedding_size"]))

    def check() -> None:
        with torch.no_grad():  # each sentence alone, from the full tables of scores
            alone = [_joint_log_prob(model, place(collate_trees([tree], 0))) for tree in chosen]
            together = model(**batch).joint_log_prob
        torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-3)

    return compare_training(model, lambda: model(**batch).loss, lstm, lambda: lstm(inputs)[0].sum(), check)


def _joint_log_prob(model: hf_synlm.RNNGForCausalLM, sentence: dict[str, Tensor]) -> Tensor:
    """Joint log-probability of words and actions [1] of one sentence from its action scores and word scores."""
    output = model(**sentence, output_logits=True)
    actions = output.action_logits.log_softmax(-1).gather(-1, sentence["actions"][..., None])
    words = output.token_logits_given_tree.log_softmax(-1).gather(-1, sentence["input_ids"][..., None])
    return (actions.sum() + words.sum())[None]


# ------------------------------------------------------------------------------------------ recurrent models
class LSTMs(nn.Module):
    """Embedding, one `nn.LSTM` per layer, and the embedding again as output layer: all from PyTorch."""

    def __init__(self, vocab_size: int, embedding_size: int, layer_sizes: list[int]) -> None:
        super().__init__()
        sizes = [embedding_size, *layer_sizes]
        self.embedding = nn.Embedding(vocab_size, embedding_size)
        self.layers = nn.ModuleList(nn.LSTM(*pair, batch_first=True) for pair in zip(sizes, sizes[1:], strict=False))
        self.projection = nn.Linear(sizes[-1], embedding_size) if sizes[-1] != embedding_size else nn.Identity()

    def forward(self, ids: Tensor) -> Tensor:
        """Mean cross entropy of the next tokens."""
        hidden = self.embedding(ids[:, :-1])
        for layer in self.layers:
            hidden, _ = layer(hidden)
        logits = F.linear(self.projection(hidden), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def _preset(config_class: Any, preset: str) -> Any:
    """Configuration of a preset without its dropout."""
    return config_class.from_preset(preset, **without_dropout(config_class, preset))


def _text(rows: int, columns: int, vocab_size: int) -> Tensor:
    """Random token ids."""
    return place(torch.randint(vocab_size, (rows, columns), generator=torch.Generator().manual_seed(1)))


def _compare_recurrent(model: Any, ids: Tensor, baseline: nn.Module, baseline_loss: Callable[[], Tensor]) -> Sides:
    """Training step of a model on a segment against that of a baseline, and the check of the model."""
    model, baseline = place(model).train(), place(baseline)

    def check() -> None:
        head, cache, logits = ids[:2, :STEPWISE_TOKENS], None, []
        model.eval()
        with torch.no_grad():
            together = model(head).logits
            for column in head.split(1, 1):
                output = model(column, **{CACHE: cache}, use_cache=True)
                cache = output[CACHE]
                logits.append(output.logits)
            scored = model(head, labels=head).joint_log_prob
        torch.testing.assert_close(torch.cat(logits, 1), together, rtol=1e-4, atol=1e-4)
        expected = together[:, :-1].gather(2, head[:, 1:, None]).sum((1, 2))
        torch.testing.assert_close(scored, expected, rtol=1e-4, atol=1e-4)
        model.train()

    return compare_training(model, lambda: model(ids, labels=ids).loss, baseline, baseline_loss, check)


def on_lstm_train() -> Sides:
    """ON-LSTM of the Penn Treebank's size on 20 rows of 70 tokens against LSTMs of the same sizes."""
    torch.manual_seed(0)
    config = _preset(hf_synlm.ONLSTMConfig, "on-lstm-ptb")
    ids = _text(20, 70, config.vocab_size)
    baseline = LSTMs(config.vocab_size, config.embedding_size, config.layer_sizes)
    return _compare_recurrent(hf_synlm.ONLSTMForCausalLM(config), ids, baseline, lambda: baseline(ids))


def prpn_train() -> Sides:
    """PRPN of the Penn Treebank's size on 64 rows of 35 tokens against LSTMs as wide and deep as its reader."""
    torch.manual_seed(0)
    config = _preset(hf_synlm.PRPNConfig, "prpn-ptb-word")
    ids = _text(64, 35, config.vocab_size)
    baseline = LSTMs(config.vocab_size, config.embedding_size, [config.layer_size] * config.num_layers)
    return _compare_recurrent(hf_synlm.PRPNForCausalLM(config), ids, baseline, lambda: baseline(ids))


def palm_train() -> Sides:
    """PaLM of the Penn Treebank's size on 20 rows of 70 tokens against the same without span attention (AWD-LSTM)."""
    torch.manual_seed(0)
    config = hf_synlm.PaLMConfig.from_preset("palm-ptb")
    ids = _text(20, 70, config.vocab_size)
    baseline = hf_synlm.PaLMForCausalLM(hf_synlm.PaLMConfig.from_preset("palm-ptb", span_attention=False)).train()
    return _compare_recurrent(hf_synlm.PaLMForCausalLM(config), ids, baseline, lambda: baseline(ids, labels=ids).loss)


# ------------------------------------------------------------------------------------------ Transformers over trees
def _gpt2(vocab_size: int = VOCAB_SIZE, layers: int = LAYERS) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {**SIZES, "vocab_size": vocab_size, "num_hidden_layers": layers}
    config = SimpleNamespace(**sizes, max_position_embeddings=512, pad_token_id=None)
    return place(gpt2(config).train())


def _compare_trees(
    model: hf_synlm.PushdownForCausalLM | hf_synlm.TreeLMForCausalLM,
    batch: dict[str, Tensor],
    baseline: GPT2LMHeadModel,
    ids: Tensor,
) -> Sides:
    """Training step on given trees against GPT-2 on `ids`; the check: a sentence has the probability it has alone."""

    def check() -> None:
        with torch.no_grad():
            alone = [model(**{name: rows[k : k + 1] for name, rows in batch.items()}).joint_log_prob for k in range(4)]
            torch.testing.assert_close(model(**batch).joint_log_prob[:4], torch.cat(alone), rtol=1e-5, atol=1e-3)

    return compare_training(model, lambda: model(**batch).loss, baseline, lambda: baseline(ids, labels=ids).loss, check)


def pushdown_train(layers: int = LAYERS) -> Sides:
    """Pushdown Layers with gold attachments against GPT-2 on the same tokens."""
    config = hf_synlm.PushdownConfig(**SIZES)
    _, labels, rows = read_embedded_trees(TRAIN_LENGTHS, NUM_SENTENCES)
    collator = AttachmentCollator(config.pad_token_id, config.closing, TransitionSystem("top_down", len(labels)))
    batch = place({name: value for name, value in collator(rows).items() if name != "num_words"})
    torch.manual_seed(0)
    model = place(hf_synlm.PushdownForCausalLM(config).train())
    begin = torch.full_like(batch["input_ids"][:, :1], config.bos_token_id)
    return _compare_trees(model, batch, _gpt2(layers=layers), torch.cat([begin, batch["input_ids"]], 1))


def transformer_grammar_train() -> Sides:
    """Transformer Grammar against GPT-2 on as many tokens: words, labels, and the second copies of closing labels."""
    _, labels, rows = read_embedded_trees(TRAIN_LENGTHS, NUM_SENTENCES)
    batch = place(collate_trees(rows, 0))
    torch.manual_seed(0)
    config = hf_synlm.TreeLMConfig(nonterminals=labels, structure_attention="stack_compose", **SIZES)
    model = place(hf_synlm.TreeLMForCausalLM(config).train())
    baseline = _gpt2(VOCAB_SIZE + 2 * len(labels))
    return _compare_trees(model, batch, baseline, linearize(batch["actions"], batch["input_ids"], config).tokens)
