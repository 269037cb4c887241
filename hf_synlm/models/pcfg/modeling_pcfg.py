# SPDX-License-Identifier: Apache-2.0
"""PCFG: a probabilistic context-free grammar over words whose rules a network scores, or a treebank has counted.

    S -> A,   A -> B C,   X -> word

A is a nonterminal, X a preterminal, and B and C are either. Only preterminals give words, so a sentence of one word has
probability 0. All trees of a sentence are summed out exactly: `log_likelihood` by the inside pass, `logits` by the
probabilities of prefixes. A sentence ends when its tree is complete: this is the end token of `logits`. The compound
PCFG has a grammar for every sentence, which depends on a vector z ~ N(0, I):

    log p(x) >= E_q(z | x) log p(x | z) - KL(q(z | x) || N(0, I))

Source: Kim, Dyer and Rush, "Compound Probabilistic Context-Free Grammars" (ACL 2019); Yang, Zhao and Tu, "PCFGs Can Do
Better" (NAACL 2021); Yang, Liu and Tu, "Dynamic Programming in Rank Space" (NAACL 2022); Liu et al., "Simple
Hardware-Efficient PCFGs" (EMNLP Findings 2023), and the authors' programs; docs/models/pcfg.md lists the differences.

Shapes: B sentences, T columns of the input, N words, Y nonterminals, X preterminals, Z latent size, V vocabulary.
Log-probabilities and losses in nats.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.generation import GenerationMixin
from transformers.utils import ModelOutput, can_return_tuple

from hf_synlm.core.cache import CACHE
from hf_synlm.core.hidden_states import asked_of_layers
from hf_synlm.core.losses import check_shares, share_of, widened
from hf_synlm.core.matrix_products import without_autocast
from hf_synlm.core.module_tools import SyntacticPreTrainedModel, evaluation_mode
from hf_synlm.core.outputs import InFieldOrder, ParseOutput, SyntacticLMOutput
from hf_synlm.core.token_batch import check_aligned
from hf_synlm.models.pcfg.cache import PCFGCache, next_token_log_probs
from hf_synlm.models.pcfg.configuration_pcfg import PCFGConfig
from hf_synlm.models.pcfg.generation import PCFGGenerationMixin
from hf_synlm.models.pcfg.inside import Grammar, inside, rows_at_once
from hf_synlm.models.pcfg.networks import GRAMMARS, LatentEncoder
from hf_synlm.models.pcfg.prefix import read_sentences
from hf_synlm.models.pcfg.sentences import Sentences, read_rows, read_whole_rows
from hf_synlm.models.pcfg.trees import (
    Derivation,
    best_trees,
    constituents,
    sample,
    span_posteriors,
    tree_log_probs,
    viterbi,
)
from hf_synlm.trees.actions import PAD_ACTION, spans_to_actions
from hf_synlm.trees.given import counted_words

METHODS = ("mbr", "viterbi", "sample")


@dataclass
class PCFGModelOutput(InFieldOrder, ModelOutput):
    """Output of the bare grammar.

    Fields:
        span_probs: [B, T + 1, T + 1] posterior probabilities that the columns i to j - 1 are a constituent, at [i, j];
            0 for single words.
        log_likelihood: [B] log p(sentence), in nats; of compound grammars that of the mean of q(z | sentence).
    """

    span_probs: Tensor | None = None
    log_likelihood: Tensor | None = None


@dataclass
class PCFGParseOutput(ParseOutput):
    """Output of `parse`.

    Fields, besides those of `ParseOutput`:
        span_probs: [B, T + 1, T + 1] posteriors of spans, as in `PCFGModelOutput`; of sparse rules by "mbr" only.
        preterminals: per sentence, per tree the preterminals of its words, "T0", "T1", ..., or their tags
            ("viterbi" and "sample").
    """

    span_probs: Tensor | None = None
    preterminals: list[list[list[str]]] | None = None


class PCFGPreTrainedModel(SyntacticPreTrainedModel):
    """Loading, saving and initialization shared by the PCFG models."""

    config: PCFGConfig
    _is_stateful = True  # assisted decoding needs a cache that can be cropped

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize as the authors do; see `PCFGConfig`."""
        kind = self.config.init
        fan_in = getattr(module, "in_features", getattr(module, "hidden_size", 1))
        for parameter in module.parameters(recurse=False):
            if parameter.dim() > 1 and kind != "default":
                getattr(init, f"{kind}_")(parameter)
            elif isinstance(module, nn.Embedding):
                init.normal_(parameter)
            else:  # PyTorch's own
                init.uniform_(parameter, -(fan_in**-0.5), fan_in**-0.5)

    def get_output_embeddings(self) -> nn.Linear:
        """The layer that scores words."""
        return self.base_model.grammar.emission_head[-1]

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the layer that scores words."""
        self.base_model.grammar.emission_head[-1] = new_embeddings

    def _resize_token_embeddings(
        self, new_num_tokens: int | None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> Any:
        if self.get_input_embeddings() is not None:
            return super()._resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        head, multiple = self.get_output_embeddings(), pad_to_multiple_of or 1
        size = math.ceil((new_num_tokens or len(head.weight)) / multiple) * multiple
        self.set_output_embeddings(self._get_resized_lm_head(head, size, mean_resizing=mean_resizing))
        return self.get_output_embeddings()


class PCFGModel(PCFGPreTrainedModel):
    """The grammar, and for compound grammars the network that infers z: token ids in, posteriors of spans out."""

    def __init__(self, config: PCFGConfig):
        super().__init__(config)
        self.grammar = GRAMMARS[config.grammar](config)
        self.encoder = LatentEncoder(config) if config.is_compound else None
        self.post_init()

    def get_input_embeddings(self) -> nn.Module | None:
        """The encoder's word embeddings; a grammar without z has none."""
        return None if self.encoder is None else self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the encoder's word embeddings."""
        self.encoder.embed_tokens = value

    def make_grammar(self, latent: Tensor | None = None) -> Grammar:
        """Probabilities of all rules: one grammar, or with z [B, Z] one for every sentence."""
        root, words, rules = self.grammar(latent)
        words = widened(words)
        if self.config.silent_ids:
            words = words.index_fill(-1, torch.tensor(self.config.silent_ids, device=words.device), -torch.inf)
        return Grammar(widened(root).softmax(-1), words.log_softmax(-1), rules)

    def infer(self, text: Sentences) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Mean and log variance [B, Z] of q(z | sentence); None without z."""
        if self.encoder is None:
            return None, None
        mean, log_variance = self.encoder(text.ids, text.count)
        return widened(mean), widened(log_variance)

    @can_return_tuple
    @torch.inference_mode(False)  # posteriors are gradients
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **others: Any
    ) -> PCFGModelOutput:
        """Posteriors of the spans of sentences.

        Args:
            input_ids: [B, T], one sentence per row; one token is one word. Begin and end tokens are not words.
            attention_mask: [B, T], 1 = token; None: everything but runs of `pad_token_id` at both ends.
            **others: arguments of other models, which must be None.

        Returns:
            `PCFGModelOutput`.

        Raises:
            ValueError: a row has no word, special tokens inside a sentence, or holes.
            TypeError: for other arguments.

        Cost: an inside pass and its gradient.
        """
        asked_of_layers(others)
        text = read_whole_rows(self.config, input_ids, attention_mask)
        grammar, log_emission = self.at_mean(text)
        log_prob, posteriors = span_posteriors(grammar, log_emission, text.count)
        return PCFGModelOutput(text.at_columns(posteriors), log_prob)

    @torch.no_grad()
    def at_mean(self, text: Sentences) -> tuple[Grammar, Tensor]:
        """The grammar of the mean of q(z | sentence), and its log p(X -> word) [B, N, X] of the words."""
        with evaluation_mode(self):
            mean, _ = self.infer(text)
            grammar = self.make_grammar(None if mean is None else mean.to(self.dtype))
        return grammar, text.emission(grammar.of_words(text.ids))


def _refuse_smoothing(logits: Tensor, gradient: Tensor) -> None:
    """Raise ValueError for a loss that reads words of probability 0."""
    if bool((gradient[logits == -torch.inf] != 0).any()):
        raise ValueError(
            "Words that cannot come next have log-probability -inf, so this loss is infinite. Pass labels and take "
            "the loss of the output. With Trainer, leave label_smoothing_factor at 0."
        )


class PCFGForCausalLM(PCFGGenerationMixin, PCFGPreTrainedModel, GenerationMixin):
    """A PCFG as a language model: exact next-token log-probabilities, training objective, trees, generation."""

    def __init__(self, config: PCFGConfig):
        super().__init__(config)
        self.model = PCFGModel(config)
        self.post_init()

    # ------------------------------------------------------------------------------------------- scores and loss
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: PCFGCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        loss_shares: Mapping[str, float] | None = None,
        latent_noise: Tensor | None = None,
        output_chart: bool = False,
        **kwargs: Any,
    ) -> SyntacticLMOutput:
        """Next-token log-probabilities, and with `labels` the training loss.

        loss = mean over sentences of -log p(x);   with z: of -log p(x | z) + KL(q(z | x) || N(0, I)), where z = mean +
        exp(log variance / 2) * noise. Sentences of one word have probability 0 and are left out of the mean.

        Args:
            input_ids: [B, T], one sentence per row; one token is one word. A leading `bos_token_id` is not a word, and
                nothing but the end token follows `eos_token_id`.
            attention_mask: [B, T], 1 = token; masked columns are skipped, wherever they are. None: everything but runs
                of `pad_token_id` at both ends.
            labels: [B, T] = `input_ids`, with -100 at all words of sentences that do not count. A sentence counts as a
                whole.
            past_key_values: state after the words before; it is updated in place. It carries no gradient.
            use_cache: return the state; default: only if it is given. Words are then read one by one.
            logits_to_keep: compute `logits` for this many last columns only (0 = all), or for these columns.
            loss_shares: by part, the share of a step's items in this call, if a step takes several calls (see
                `count_loss_items`). The losses of the calls then add up to that of all their rows together.
            latent_noise: [B, Z] noise of z instead of a new draw in training and the mean in evaluation mode.
            output_chart: also return `chart["span_probs"]` [B, T + 1, T + 1]; see `PCFGModelOutput`.
            **kwargs: `shift_labels` [B, T], labels already shifted: position t holds the target of token t + 1 (they
                replace `labels`).

        Returns:
            `SyntacticLMOutput` with `logits` [B, T, V], log p(next token | prefix), exact; they carry gradients, but
            not with a cache. With labels also `loss`, `losses` ("language_model", "kl") and `joint_log_prob` [B], here
            log p(x), or log p(x | z) - KL, of every sentence; in training mode no `logits` then.

        Raises:
            ValueError: for special tokens inside a sentence, labels that leave out single words, and a batch without a
                sentence of two words.
            TypeError: for other keyword arguments.

        Cost: see `inside.py` for the loss, `prefix.py` for `logits`.
        """
        shift_labels = kwargs.pop("shift_labels", None)
        if shift_labels is not None:
            labels = _unshifted(input_ids, shift_labels)
        asked_of_layers(kwargs)
        check_shares(loss_shares, ("language_model", "kl"))
        result = SyntacticLMOutput()
        if past_key_values is not None or (use_cache and labels is None):
            return self._read_on(input_ids, attention_mask, past_key_values, logits_to_keep)
        if output_chart:
            found = self.model(input_ids, attention_mask, return_dict=True)
            result.chart = {"span_probs": found.span_probs}
        if labels is None or not self.training:
            text = read_rows(self.config, input_ids, attention_mask)
            columns = torch.arange(input_ids.shape[1], device=input_ids.device)
            kept = columns[-logits_to_keep:] if isinstance(logits_to_keep, int) else logits_to_keep
            result.logits = self._next_tokens(text, text.mask.cumsum(1)[:, kept], text.ended[:, kept])
            if result.logits.requires_grad:
                result.logits.register_hook(functools.partial(_refuse_smoothing, result.logits.detach()))
        if labels is not None:
            self._add_loss(result, input_ids, attention_mask, labels, loss_shares, latent_noise)
        return result

    def _read_on(
        self, input_ids: Tensor, mask: Tensor | None, cache: PCFGCache | None, logits_to_keep: int | Tensor
    ) -> SyntacticLMOutput:
        grammars = self._prior_grammars() if cache is None else []
        with torch.no_grad(), without_autocast(self.device.type):
            cache = PCFGCache(grammars, len(input_ids)) if cache is None else cache
            logits = cache.read(self.config, input_ids, mask)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return SyntacticLMOutput(logits=logits[:, kept], **{CACHE: cache})

    def _prior_grammars(self) -> list[Grammar]:
        """The grammars of which next words are a mixture."""
        config = self.config
        if not config.is_compound:
            return [self.model.make_grammar()]
        latents = torch.zeros(1, config.latent_size)
        if config.num_prior_samples > 1:
            seeded = torch.Generator().manual_seed(config.prior_seed)
            latents = torch.randn(config.num_prior_samples, config.latent_size, generator=seeded)
        grammars = [self.model.make_grammar(latent[None]) for latent in latents.to(self.device, self.model.dtype)]
        return [grammar.single() for grammar in grammars]

    def _mixture(self, text: Sentences) -> list[tuple[Grammar, Tensor, Tensor, Tensor, Tensor]]:
        """By grammar of the mixture: log p of whole sentences, and what `_read` gives after 0, 1, ... words."""
        found = list[Any]()
        for grammar in self._prior_grammars():
            log_emission = text.emission(grammar.of_words(text.ids))
            parts = [_read(grammar, part) for part in log_emission.split(rows_at_once(grammar, text.ids.shape[1]))]
            found.append((grammar, *map(torch.cat, zip(*parts, strict=True))))
        return found

    def _next_tokens(self, text: Sentences, places: Tensor, ended: Tensor) -> Tensor:
        """Log p(next token) [B, P, V] after so many words `places` [B, P]; `ended` [B, P]."""
        rows = torch.arange(len(places), device=places.device)[:, None]
        found = self._mixture(text)
        return next_token_log_probs(
            self.config,
            [(grammar, weights[rows, places], scale[rows, places]) for grammar, _, weights, scale, _ in found],
            torch.stack([F.pad(whole, (1, 0), value=-torch.inf)[rows, places] for _, whole, *_ in found]),
            torch.stack([prefix[rows, places] for *_, prefix in found]),
            ended,
        )

    def _add_loss(
        self,
        result: SyntacticLMOutput,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        labels: Tensor,
        loss_shares: Mapping[str, float] | None,
        noise: Tensor | None,
    ) -> None:
        """Add the loss and its parts to an output."""
        text = read_whole_rows(self.config, input_ids, attention_mask)
        counted = self._counted(input_ids, labels, text)
        if not counted.any():
            raise ValueError("No loss: every sentence has one word or only labels of -100. Give longer sentences.")
        shape = (len(text.count), self.config.latent_size)
        if noise is not None and noise.shape != shape:
            raise ValueError(f"latent_noise has shape {tuple(noise.shape)}, but needs the shape of z, {shape}.")
        mean, log_variance = self.model.infer(text)
        latent, divergence = None, torch.zeros_like(text.count)
        if mean is not None:
            if noise is None:
                noise = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
            latent = mean + (log_variance / 2).exp() * noise
            divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1) / 2
        log_prob = self._sentence_log_probs(text, latent)
        losses = {"language_model": -log_prob[counted].mean()}
        if mean is not None:
            losses["kl"] = divergence[counted].mean()
        losses = {name: value * share_of(loss_shares, name) for name, value in losses.items()}
        result.loss = torch.stack(list(losses.values())).sum()
        result.joint_log_prob = (log_prob - divergence).detach()
        result.losses = {name: value.detach() for name, value in losses.items()}

    def _sentence_log_probs(self, text: Sentences, latent: Tensor | None) -> Tensor:
        """Log p(x) or log p(x | z) [B]."""
        grammar = self.model.make_grammar(None if latent is None else latent.to(self.model.dtype))
        chart = inside(grammar, text.emission(grammar.of_words(text.ids)))
        return chart.whole.gather(1, text.count[:, None] - 1).squeeze(1)

    def _counted(self, input_ids: Tensor, labels: Tensor, text: Sentences) -> Tensor:
        """Rows [B] that count in the loss: sentences of two or more words, with labels."""
        words = counted_words(input_ids, labels, text.mask).sum(1)
        if ((words > 0) & (words < text.count)).any():
            raise ValueError(
                "Some labels of a sentence are -100, but the loss needs all. Set all labels to -100, or none."
            )
        return (words > 1).to(text.count.device)

    def count_loss_items(self, input_ids: Tensor, **others: Any) -> dict[str, int]:
        """How many sentences the parts of the loss are means over.

        `training.engine.steps.to_shares` divides them by those of all calls of a step: the `loss_shares` of a call.

        Args:
            input_ids: [B, T], as for `forward`.
            **others: further arguments of `forward`.

        Returns:
            Counts by the names of `losses`.
        """
        text, shifted = read_rows(self.config, input_ids, others.get("attention_mask")), others.get("shift_labels")
        labels = others["labels"] if shifted is None else _unshifted(input_ids, shifted)
        count = int(self._counted(input_ids, labels, text).sum())
        return {"language_model": count, "kl": count}

    @torch.no_grad()
    def log_likelihood(self, input_ids: Tensor, attention_mask: Tensor | None = None, num_samples: int = 1) -> Tensor:
        """Log p(sentence) [B] in nats, with all trees; -inf for one word.

        With z: log of the mean over `num_samples` z drawn from q of p(x | z) p(z) / q(z | x). On average this is a
        lower bound, which tightens with their number.

        Args:
            input_ids: [B, T], as for `parse`.
            attention_mask: [B, T] or None.
            num_samples: number of draws of z; no effect without z.

        Returns:
            Log-probabilities [B].

        Raises:
            ValueError: see `parse`.
        """
        text = read_whole_rows(self.config, input_ids, attention_mask)
        with evaluation_mode(self):
            mean, log_variance = self.model.infer(text)
            if mean is None:
                return self._sentence_log_probs(text, None)
            found = []
            for _ in range(num_samples):
                noise = torch.randn_like(mean)
                latent = mean + (log_variance / 2).exp() * noise
                # log p(z) - log q(z | x)
                ratio = (noise.square() + log_variance - latent.square()).sum(1) / 2
                found.append(self._sentence_log_probs(text, latent) + ratio)
        samples = torch.stack(found)
        return samples.logsumexp(0) - math.log(num_samples)

    # ------------------------------------------------------------------------------------------------------ trees
    @torch.inference_mode(False)
    @torch.no_grad()
    def parse(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        word_ends: Tensor | None = None,
        method: str | None = None,
        num_return_sequences: int = 1,
        num_beams: None = None,
    ) -> PCFGParseOutput:
        """Trees and log-probabilities of given sentences; of a compound grammar those of the mean of q(z | sentence).

        Args:
            input_ids: [B, T], one sentence per row; begin and end tokens are not words.
            attention_mask: [B, T], 1 = token; None: everything but runs of `pad_token_id` at both ends.
            word_ends: [B, T], True at every word, because the grammar has no pieces of words.
            method: "mbr", the binary tree with the largest expected number of correct spans (minimum Bayes risk);
                "viterbi", the best derivation; "sample", derivations drawn from the posterior. Default: "mbr", or
                "viterbi" if symbols have names.
            num_return_sequences: trees per sentence; more than one with "sample" only.
            num_beams: not possible: all trees are summed out.

        Returns:
            `PCFGParseOutput` with binary trees. `log_probs` [B, N]: "mbr" log p(text, tree), labels summed out,
            otherwise log p of the derivation, whose `labels` ("NT0", ...) and `preterminals` are given, too. Where
            symbols have names, spans and labels are the constituents of a treebank; `actions` stay binary.
            `token_log_probs` and `text_log_probs` are exact and those of `forward`; the latter has the end.

        Raises:
            ValueError: for another method, a beam, pieces of words, "viterbi" with a table of rules that is too large,
                and bad input (see `forward`).

        Cost: an inside pass, and for "mbr" its gradient; see `viterbi` and `sample` in `trees.py`.
        Source: section 3.3 of Kim et al. (2019) for "viterbi", the program of Yang et al. for "mbr".
        """
        method = method or self.config.parse_method
        if method not in METHODS:
            raise ValueError(f"method {method!r} is unknown. Choose one of {list(METHODS)}.")
        if num_return_sequences < 1 or (num_return_sequences > 1 and method != "sample"):
            raise ValueError(f"num_return_sequences is {num_return_sequences}. Give 1, or more with method='sample'.")
        text = read_whole_rows(self.config, input_ids, attention_mask)
        check_aligned(input_ids, word_ends=word_ends)
        if word_ends is not None and not bool(word_ends[text.mask].all()):
            raise ValueError("A word has several tokens, but the grammar reads words. Use the grammar's tokenizer.")
        with evaluation_mode(self):
            token_log_probs, whole = self._token_log_probs(text)
            output = self._parse(text, method, num_return_sequences, whole.isfinite())
        output.token_log_probs, output.text_log_probs = token_log_probs, whole
        output.input_ids = input_ids
        if word_ends is not None:
            bounds = zip(output.offsets, output.lengths, strict=True)
            output.word_ends = [list(range(offset + 1, offset + length + 1)) for offset, length in bounds]
        return output

    def _parse(self, text: Sentences, method: str, count: int, possible: Tensor) -> PCFGParseOutput:
        """Trees and their log-probabilities; sentences of one word, and others of probability 0, have no tree."""
        grammar, log_emission = self.model.at_mean(text)
        with_posteriors, size = method == "mbr" or self.config.grammar != "sparse", log_emission.shape[1] + 1
        posteriors = log_emission.new_zeros(len(log_emission), size, size)
        derivations = [[Derivation([], [], [])] * count if n == 1 else [] for n in text.lengths]
        scores = log_emission.new_full((len(text.count), count), -torch.inf)
        for rows in possible.nonzero()[:, 0].split(rows_at_once(grammar, size - 1)) if possible.any() else ():
            given = grammar.of_rows(rows), log_emission[rows], text.count[rows]
            if with_posteriors:
                posteriors[rows] = span_posteriors(*given)[1]
            if method == "mbr":
                trees = best_trees(posteriors[rows], given[2])
                found = [Derivation(tree, [], []) for tree in trees]
                log_probs = tree_log_probs(*given, trees)
            elif method == "viterbi":
                found, log_probs = viterbi(*given)
            else:
                found, log_probs = sample(*given, count)
            scores[rows] = log_probs.view(-1, count)
            for number, row in enumerate(rows.tolist()):
                derivations[row] = found[number * count : (number + 1) * count]
        output = self._with_trees(text, derivations, scores)
        if with_posteriors:
            output.span_probs = text.at_columns(posteriors)
        if method != "mbr":
            self._add_labels(output, derivations)
        return output

    def _add_labels(self, output: PCFGParseOutput, derivations: list[list[Derivation]]) -> None:
        """Add the labels of derivations, and their constituents where symbols have names."""
        labels = self.config.labels[self.config.num_nonterminals :]
        found = [[constituents(self.config, tree.nodes, tree.preterminals) for tree in trees] for trees in derivations]
        output.labels = [[[label for _, label in tree] for tree in trees] for trees in found]
        output.spans = [
            [[(i + x, j + x) for (i, j), _ in tree] for tree in trees]
            for trees, x in zip(found, output.offsets, strict=True)
        ]
        output.preterminals = [[[labels[x][-1] for x in one.preterminals] for one in trees] for trees in derivations]

    def _with_trees(self, text: Sentences, derivations: list[list[Derivation]], scores: Tensor) -> PCFGParseOutput:
        """Trees over columns, with their actions."""
        offsets, lengths = text.first.tolist(), text.lengths
        width, device = 2 * max(lengths) - 1, scores.device
        actions = torch.full((len(lengths), scores.shape[1], width), PAD_ACTION)
        for row, (trees, length) in enumerate(zip(derivations, lengths, strict=True)):
            for rank, tree in enumerate(trees):
                steps = spans_to_actions(tree.spans, length)
                actions[row, rank, : len(steps)] = torch.tensor(steps)
        return PCFGParseOutput(
            spans=[
                [[(i + x, j + x) for i, j in tree.spans] for tree in trees]
                for trees, x in zip(derivations, offsets, strict=True)
            ],
            actions=actions.to(device),
            log_probs=scores,
            offsets=offsets,
            lengths=lengths,
        )

    def _token_log_probs(self, text: Sentences) -> tuple[Tensor, Tensor]:
        """Log p of every token given those before it [B, T], and of the sentences [B]."""
        found = self._mixture(text)
        share = math.log(len(found))
        prefix = torch.stack([prefix for *_, prefix in found]).logsumexp(0) - share
        whole = torch.stack([whole for _, whole, *_ in found]).logsumexp(0) - share
        whole = whole.gather(1, text.count[:, None] - 1).squeeze(1)
        steps = F.pad(prefix.diff(dim=1), (1, 0)).gather(1, text.mask.cumsum(1))
        end = whole - prefix.gather(1, text.count[:, None]).squeeze(1)
        return torch.where(text.mask, steps, torch.where(text.closing, end[:, None], 0.0)), whole


def _read(grammar: Grammar, log_emission: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log p of the first 1, 2, ... words as a sentence; weights of preterminals, scales, and log p of prefixes."""
    chart = inside(grammar, log_emission)
    preterminals, scale = read_sentences(grammar, chart)
    steps = (preterminals[:, :-1] * chart.emission).sum(-1).log() + scale[:, :-1] + chart.scale[0]
    return chart.whole, preterminals, scale, F.pad(steps, (1, 0))


def _unshifted(input_ids: Tensor, shift_labels: Tensor) -> Tensor:
    """Labels [B, T] whose targets stand at their own columns; the first column counts as the second does."""
    return torch.cat([torch.where(shift_labels[:, :1] == -100, -100, input_ids[:, :1]), shift_labels[:, :-1]], 1)
