"""RNNG against an LSTM, and its search against other settings of the same search.

The sentences and derivations are those of the embedded treebank, so that depth, width and length are real. Before a
search is timed, the model is trained for a few steps: the work of a search depends on how sure the model is.
"""

import statistics
from collections.abc import Sequence

import torch
from benchmarks.sides import Sides, check_gradients, place, seconds, training_step
from torch import Tensor, nn

from hf_synlm import RNNGConfig, RNNGForCausalLM
from hf_synlm.core.outputs import ParseOutput
from hf_synlm.data.collate import collate_trees
from hf_synlm.data.gold_trees import encode_trees, label_inventory
from hf_synlm.data.samples import sample_path
from hf_synlm.data.treebank import TreebankSentence, read_treebank
from hf_synlm.data.vocabulary import word_tokenizer
from hf_synlm.models.rnng.actions import TransitionSystem

SIZES = {"vocab_size": 5400, "embedding_size": 256, "hidden_size": 256, "num_layers": 2, "dropout": 0.0}
TRAIN_LENGTHS = range(16, 23)  # words per sentence
SEARCH_TOKENS, WARM_UP_STEPS, SEARCH_BATCH = 17, 40, 8
WORD_BEAM, FAST_TRACK = 10, 1


def _treebank() -> tuple[list[TreebankSentence], tuple[str, ...], list[dict]]:
    """Sentences, labels, and encoded trees of the embedded treebank."""
    sentences = list(read_treebank(sample_path("trees.train.txt")))
    labels = label_inventory(sentences)
    tokenizer = word_tokenizer([sentence.words for sentence in sentences], unknown="berkeley")
    return sentences, labels, encode_trees(sentences, tokenizer, TransitionSystem("top_down", len(labels)), labels)


def read_embedded_trees(
    lengths: range, num_sentences: int
) -> tuple[list[TreebankSentence], tuple[str, ...], list[dict]]:
    """The first sentences of the embedded treebank with so many words: sentences, labels, and encoded trees."""
    sentences, labels, trees = _treebank()
    chosen = [k for k, sentence in enumerate(sentences) if len(sentence.words) in lengths][:num_sentences]
    return [sentences[k] for k in chosen], labels, [trees[k] for k in chosen]


def rnng_train(num_sentences: int) -> Sides:
    """Forward and backward of the training objective against an LSTM over as many steps as there are pushes.

    Every action of the top-down system pushes one element: an open nonterminal, a word, or a constituent. The LSTM has
    no embedding, no output layer and no composition.

    Args:
        num_sentences: sentences per step.

    Returns:
        Both sides.
    """
    _, labels, chosen = read_embedded_trees(TRAIN_LENGTHS, num_sentences)
    batch = place(collate_trees(chosen, 0))
    torch.manual_seed(0)
    model = place(RNNGForCausalLM(RNNGConfig(nonterminals=labels, **SIZES)).train())
    lstm = place(nn.LSTM(SIZES["embedding_size"], SIZES["hidden_size"], SIZES["num_layers"], batch_first=True))
    pushes = sum(len(tree["actions"]) for tree in chosen)
    inputs = place(torch.randn(num_sentences, -(-pushes // num_sentences), SIZES["embedding_size"]))

    ours = training_step(model, lambda: model(**batch).loss)
    theirs = training_step(lstm, lambda: lstm(inputs)[0].sum())

    def check() -> None:
        with torch.no_grad():  # each sentence alone, from the full tables of scores
            alone = [_joint_log_prob(model, place(collate_trees([tree], 0))) for tree in chosen]
            together = model(**batch).joint_log_prob
        torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-3)
        ours()
        check_gradients(model)

    return Sides(ours, theirs, check, model)


def _joint_log_prob(model: RNNGForCausalLM, sentence: dict[str, Tensor]) -> Tensor:
    """Joint log-probability of words and actions [1] of one sentence from its action scores and word scores."""
    output = model(**sentence, output_logits=True)
    actions = output.action_logits.log_softmax(-1).gather(-1, sentence["actions"][..., None])
    words = output.token_logits_given_tree.log_softmax(-1).gather(-1, sentence["input_ids"][..., None])
    return (actions.sum() + words.sum())[None]


class SearchedSentences:
    """A briefly trained model and sentences that it has not seen in training."""

    def __init__(self) -> None:
        sentences, labels, trees = _treebank()
        torch.manual_seed(0)
        self.model = RNNGForCausalLM(RNNGConfig(nonterminals=labels, **SIZES))
        optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        for start in range(0, 32 * WARM_UP_STEPS, 32):
            optimizer.zero_grad()
            self.model(**collate_trees(trees[start : start + 32], 0)).loss.backward()
            optimizer.step()
        place(self.model.eval())
        unseen = zip(sentences[32 * WARM_UP_STEPS :], trees[32 * WARM_UP_STEPS :], strict=True)
        self.ids = [place(torch.tensor(tree["input_ids"])) for x, tree in unseen if len(x.words) == SEARCH_TOKENS]

    def search(self, ids: Sequence[Tensor], action_beam_size: int, **options: str) -> ParseOutput:
        """Search sentences of one length together."""
        return self.model.parse(
            torch.stack(list(ids)),
            num_beams=WORD_BEAM,
            action_beam_size=action_beam_size,
            fast_track_size=FAST_TRACK,
            **options,
        )

    def check(self, ids: Sequence[Tensor], action_beam_size: int) -> None:
        """The best derivation has the score that `forward` gives it; sentences have the scores they have alone."""
        together = self.search(ids, action_beam_size, normalization="train")
        with torch.no_grad():
            rescored = self.model(torch.stack(list(ids)), actions=together.actions[:, 0]).joint_log_prob
        torch.testing.assert_close(together.log_probs[:, 0], rescored, rtol=1e-5, atol=1e-3)
        for x, sentence in enumerate(ids):
            alone = self.search([sentence], action_beam_size, normalization="train")
            torch.testing.assert_close(together.token_log_probs[x], alone.token_log_probs[0], rtol=1e-4, atol=1e-3)
            torch.testing.assert_close(together.log_probs[x], alone.log_probs[0], rtol=1e-4, atol=1e-3)


def rnng_search(action_beam_size: int, baseline_size: int) -> Sides:
    """Search of one sentence with a wide beam against the same search with a narrow one.

    Args:
        action_beam_size: of the measured side.
        baseline_size: of the baseline.

    Returns:
        Both sides.
    """
    data = SearchedSentences()
    ids = data.ids[:1]
    return Sides(
        lambda: data.search(ids, action_beam_size),
        lambda: data.search(ids, baseline_size),
        lambda: data.check(ids, action_beam_size),
    )


def rnng_search_batched(action_beam_size: int) -> Sides:
    """Search of several sentences together against the same sentences one by one.

    Args:
        action_beam_size: of both sides.

    Returns:
        Both sides.
    """
    data = SearchedSentences()
    ids = data.ids[:SEARCH_BATCH]
    return Sides(
        lambda: data.search(ids, action_beam_size),
        lambda: [data.search([sentence], action_beam_size) for sentence in ids],
        lambda: data.check(ids, action_beam_size),
    )


def rnng_search_growth(runs: int) -> str:
    """How the cost of a search grows with the action beam, the length and the batch.

    Args:
        runs: timings per row; the median counts.

    Returns:
        A table in Markdown: time per sentence as a ratio to that of one sentence of 17 tokens with action beam 10,
        which is timed in turn with every row.
    """
    data = SearchedSentences()
    first, second = data.ids[0], data.ids[1]
    rows = [(f"action beam {size}", [first], size) for size in (20, 50, 100, 200, 400)]
    lengths = {8: first[:8], 34: torch.cat([first, second]), 68: torch.cat(data.ids[:4])}
    rows += [(f"action beam 100, {length} tokens", [ids], 100) for length, ids in lengths.items()]
    rows += [(f"action beam 100, {size} sentences together", data.ids[:size], 100) for size in (2, 4, 8, 16)]
    lines = ["| search | time per sentence |", "|---|---|", "| action beam 10, 17 tokens, one sentence | 1 |"]
    for name, ids, size in rows:
        ratios = []
        for _ in range(runs):
            base, this = seconds(lambda: data.search([first], 10)), seconds(lambda i=ids, s=size: data.search(i, s))
            ratios.append(this / len(ids) / base)
        lines.append(f"| {name} | {statistics.median(ratios):.2f} |")
    return "\n".join(lines)
