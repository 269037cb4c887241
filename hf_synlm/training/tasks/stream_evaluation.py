# SPDX-License-Identifier: Apache-2.0
"""How well a recurrent language model predicts held-out text, and F1 of the trees that it induces."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, gather_object
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.core.cache import CACHE
from hf_synlm.core.module_tools import evaluation_mode
from hf_synlm.data.streams import StreamRows, TokenStream, collate_framed
from hf_synlm.data.text import errors_at
from hf_synlm.evaluation.text.perplexity import perplexity_of
from hf_synlm.evaluation.trees.gold_treebank import Treebank, score_trees
from hf_synlm.evaluation.trees.parsing import ParsingScores, resolve_convention
from hf_synlm.evaluation.trees.treebank_parsing import parse_words
from hf_synlm.training.arguments.text import TextDataArguments
from hf_synlm.training.engine.samplers import padded_batches
from hf_synlm.training.engine.steps import to_device
from hf_synlm.training.tasks.stream_batches import SentenceDataset
from hf_synlm.training.tasks.tree_evaluation import parse_together, spread


def text_losses(nats: float, num_tokens: int, of_characters: bool) -> dict[str, float]:
    """Likelihood of a text in the usual units: `nats`, `tokens` (boundaries included), `nats_per_token`, and one more.

    That is `bits_per_character` = nats per token / ln 2 for characters, otherwise `perplexity` = exp(nats per token).
    """
    mean = nats / num_tokens
    losses = {"nats": nats, "tokens": num_tokens, "nats_per_token": mean}
    if of_characters:
        return {**losses, "bits_per_character": mean / math.log(2)}
    return {**losses, "perplexity": perplexity_of(mean)}


@torch.no_grad()
def share_buffers(accelerator: Accelerator, model: nn.Module) -> None:
    """Broadcast the buffers of the main process, whose model is saved; DDP does so only before training steps."""
    for buffer in accelerator.unwrap_model(model).buffers():
        broadcast(buffer)


@torch.no_grad()
def evaluate_stream(
    accelerator: Accelerator, model: nn.Module, stream: TokenStream, num_rows: int, segment_length: int
) -> float:
    """Negative log-likelihood of a stream in nats; every process calls.

    Every token but the first boundary is predicted once. The processes share the `num_rows` rows; up to rounding, the
    sum does not depend on their number. With one row every token is predicted from all tokens before it; with more,
    each row begins without context.
    """
    plain = accelerator.unwrap_model(model)
    rows = StreamRows(stream, num_rows, complete=True)
    share = range(accelerator.process_index, num_rows, accelerator.num_processes)
    total, cache = 0.0, None
    with evaluation_mode(plain):
        for start in range(0, rows.length if share else 0, segment_length):
            batch = to_device(rows.segment(start, segment_length, share), accelerator.device)
            output = plain(**batch, **{CACHE: cache}, use_cache=True)
            cache = output[CACHE]
            total -= output.joint_log_prob.cpu().double().sum().item()
    return sum(gather_object([total]))


@torch.no_grad()
def evaluate_sentences(
    accelerator: Accelerator, model: nn.Module, stream: TokenStream, pad_token_id: int, batch_size: int, max_tokens: int
) -> float:
    """Negative log-likelihood in nats of the sentences of a stream, each read alone; every process calls.

    The sum is over all words and the boundary after each sentence. A call has up to `batch_size` sentences and
    `max_tokens` padded tokens.
    """
    plain = accelerator.unwrap_model(model)
    sentences = SentenceDataset(stream)
    batches = padded_batches(sentences.lengths, batch_size, max_tokens)
    total = 0.0
    with evaluation_mode(plain):
        for numbers in batches[accelerator.process_index :: accelerator.num_processes]:
            batch = collate_framed(stream, [sentences[k] for k in numbers], pad_token_id, gold=False)
            output = plain(**to_device(batch, accelerator.device))
            total -= output.joint_log_prob.cpu().double().sum().item()
    return sum(gather_object([total]))


@dataclass
class TreeScorer:
    """F1 of induced trees on a treebank.

    `options` are those of `model.parse`, `convention` a name in `hf_synlm.evaluation.trees.parsing`. `max_sentences`
    are spread evenly; `None`: all.
    """

    treebank: Treebank
    tokenizer: PreTrainedTokenizerBase
    convention: str
    options: dict[str, Any]
    batch_size: int
    max_sentences: int | None = None

    def rehearse(self, model: PreTrainedModel) -> None:
        """Parse and score the first scored sentence, so that a wrong option of `parse` fails before training."""
        first = self.treebank.select(self.treebank.numbers_scored(resolve_convention(self.convention))[:1])
        with errors_at("parse_options"):
            trees = parse_words(model, self.tokenizer, first.words, **self.options)
        score_trees(trees, first, self.convention)

    def run(self, accelerator: Accelerator, model: nn.Module) -> ParsingScores:
        """Parse and score; the processes share the sentences, and every one has to call."""
        chosen = self.treebank.select(spread(len(self.treebank.words), self.max_sentences))
        trees = parse_together(accelerator, model, self.tokenizer, chosen, self.batch_size, **self.options)
        return score_trees(trees, chosen, self.convention)


@dataclass
class TextEvaluator:
    """Evaluates held-out text and, if there is a scorer, induced trees; the main process prints the result.

    `batch_size` counts rows of the stream, or sentences. A text that is too short for them is refused at once.
    """

    accelerator: Accelerator
    name: str
    stream: TokenStream
    data: TextDataArguments
    pad_token_id: int
    batch_size: int
    scorer: TreeScorer | None = None

    def __post_init__(self):
        try:
            if self.data.batching == "stream":
                StreamRows(self.stream, self.batch_size, complete=True)
            else:
                SentenceDataset(self.stream)
        except ValueError as error:
            raise ValueError(f"{self.name} text: {error}") from error

    def run(self, model: nn.Module, step: int) -> dict[str, Any]:
        """Evaluate; every process has to call."""
        accelerator, name, data = self.accelerator, self.name, self.data
        share_buffers(accelerator, model)
        if data.batching == "stream":
            nats = evaluate_stream(accelerator, model, self.stream, self.batch_size, data.bptt)
            count = len(self.stream) - 1
        else:
            limits = (self.batch_size, data.max_batch_tokens)
            nats = evaluate_sentences(accelerator, model, self.stream, self.pad_token_id, *limits)
            count = int((SentenceDataset(self.stream).lengths - 1).sum())
        losses = text_losses(nats, count, data.tokenizer_type == "characters")
        result: dict[str, Any] = {"step": step, "losses": losses}
        flat = {f"{name}/{key}": value for key, value in losses.items()}
        text = "  ".join(f"{key} {value:.5g}" for key, value in losses.items() if key not in ("nats", "tokens"))
        if self.scorer is not None:
            scores = self.scorer.run(accelerator, model)
            result["trees"] = {"convention": scores.convention, **scores.numbers()}
            flat |= {f"{name}/{key}": value for key, value in scores.numbers().items()}
            f1 = f"F1 {100 * scores.sentence_f1:.2f} (sentence) {100 * scores.corpus_f1:.2f} (corpus)"
            text += f"  {f1} of {scores.num_sentences} parsed sentences"
        accelerator.print(f"step {step}: {name}: {text}")
        accelerator.log(flat, step=step)
        return result
