# SPDX-License-Identifier: Apache-2.0
"""The networks that make a grammar of vectors of symbols, and the one that infers the vector z of a sentence.

    Res(x) = x + relu(W2 relu(W1 x + b1) + b2),   MLP = Linear, Res, Res, Linear

There is no dropout and no normalization. z stands behind the vectors of the symbols that depend on it.

Source: Kim et al. (2019) for the dense grammars; Yang et al. (2021, 2022) for those of low rank; Liu et al. (2023) for
the simple ones; everything as in the authors' programs (harvardnlp/compound-pcfg, sustcsonglin/TN-PCFG).

Shapes: B sentences, T words, Y nonterminals, X preterminals, S = Y + X symbols, D symbol size, Z latent size, r rank,
V vocabulary. `*` is nothing, or B.
"""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from hf_synlm.core.losses import widened
from hf_synlm.core.matrix_products import without_autocast
from hf_synlm.core.module_tools import saved_whole, weight_of
from hf_synlm.models.pcfg.configuration_pcfg import PCFGConfig
from hf_synlm.models.pcfg.rules import DenseRules, LowRankRules, SparseRules


class ResidualLayer(nn.Module):
    """x + relu(W2 relu(W1 x + b1) + b2)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, values: Tensor) -> Tensor:
        """Values [..., D] -> [..., D]."""
        return values + self.second(self.first(values).relu()).relu()


def _mlp(inputs: int, size: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, size), ResidualLayer(size), ResidualLayer(size), nn.Linear(size, outputs))


class DenseGrammar(nn.Module):
    """Neural and compound PCFG: a softmax over all pairs of children.

    root = softmax(MLP([e_S; z])),   emission[X] = softmax(MLP([e_X; z])),   rule[A] = softmax(W [e_A; z] + b)
    """

    def __init__(self, config: PCFGConfig) -> None:
        super().__init__()
        size, nonterminals, preterminals = config.symbol_size, config.num_nonterminals, config.num_preterminals
        inputs = size + config.latent_size
        self.root, self.preterminals = nn.Embedding(1, size), nn.Embedding(preterminals, size)
        self.nonterminals = nn.Embedding(nonterminals, size)
        self.root_head = _mlp(inputs, size, nonterminals)
        self.emission_head = _mlp(inputs, size, config.vocab_size)
        self.rule_head = nn.Linear(inputs, (nonterminals + preterminals) ** 2)
        self.num_symbols = nonterminals + preterminals

    def forward(self, latent: Tensor | None) -> tuple[Tensor, Tensor, DenseRules]:
        """Scores of the root [*, Y] and of the words [*, X, V], and the rules, given z [B, Z]."""
        root, words, parents = (
            _with_latent(weight_of(symbols), latent) for symbols in (self.root, self.preterminals, self.nonterminals)
        )
        rule = _softmax(self.rule_head(parents), -1).unflatten(-1, (self.num_symbols, -1))
        return self.root_head(root).squeeze(-2), self.emission_head(words), DenseRules(rule)


class TensorGrammar(nn.Module):
    """TN-PCFG: head = softmax over ranks of f(e_A), left and right = softmax over symbols of g(e_B) and h(e_C).

    f, g and h are Linear, relu, Linear; root and emission are those of the neural PCFG. With `shared`, the second
    layers of f, g and h are one matrix without bias, and preterminals have one vector for words and rules.
    """

    def __init__(self, config: PCFGConfig) -> None:
        super().__init__()
        size, preterminals, rank = config.symbol_size, config.num_preterminals, config.rank
        shared = config.grammar == "tensor_shared"
        self.num_nonterminals = config.num_nonterminals
        self.root, self.symbols = nn.Embedding(1, size), nn.Embedding(config.num_nonterminals + preterminals, size)
        self.preterminals = None if shared else nn.Embedding(preterminals, size)
        self.root_head = _mlp(size, size, config.num_nonterminals)
        self.emission_head = _mlp(size, size, config.vocab_size)
        self.parent, self.left, self.right = (nn.Linear(size, size) for _ in range(3))
        projections = [nn.Linear(size, rank, bias=not shared) for _ in range(1 if shared else 3)]
        self.projections = nn.ModuleList(projections)

    def forward(self, latent: None) -> tuple[Tensor, Tensor, LowRankRules]:
        """See `DenseGrammar`; there is no z."""
        symbols, size = weight_of(self.symbols), self.num_nonterminals
        hidden = [self.parent(symbols[:size]).relu(), self.left(symbols).relu(), self.right(symbols).relu()]
        projections = [*self.projections] * (3 // len(self.projections))
        head, left, right = (layer(values) for layer, values in zip(projections, hidden, strict=True))
        words = symbols[size:] if self.preterminals is None else weight_of(self.preterminals)
        rules = LowRankRules(_softmax(head, -1), _softmax(left, 0), _softmax(right, 0))
        return self.root_head(weight_of(self.root)).squeeze(-2), self.emission_head(words), rules


class SimpleGrammar(nn.Module):
    """Simple PCFG: given the parent, its children do not depend on each other.

    q_A = relu(W [e_A; z] + b) + e_A,   left[B, A] = softmax over B of (relu(W' e_B + b') + e_B) . q_A,   right likewise
    root = softmax(e_S . e_A),   emission[X] = softmax(E^T (t(e_X) + e_X)),   t: Linear, Res, Res, Res
    With z: emission[X] = softmax(MLP([e_X; z])); the root and the children do not see z.
    """

    def __init__(self, config: PCFGConfig) -> None:
        super().__init__()
        size, inputs = config.symbol_size, config.symbol_size + config.latent_size
        self.num_nonterminals = config.num_nonterminals
        self.root = nn.Embedding(1, size)
        self.symbols = nn.Embedding(config.num_nonterminals + config.num_preterminals, size)
        self.parent, self.left, self.right = nn.Linear(inputs, size), nn.Linear(size, size), nn.Linear(size, size)
        if config.latent_size:
            self.emission_head = _mlp(inputs, size, config.vocab_size)
        else:
            residual = [ResidualLayer(size) for _ in range(3)]
            self.preterminal_layers = nn.Sequential(nn.Linear(size, size), *residual)
            self.emission_head = nn.Sequential(nn.Linear(size, config.vocab_size, bias=False))

    def forward(self, latent: Tensor | None) -> tuple[Tensor, Tensor, LowRankRules]:
        """See `DenseGrammar`."""
        symbols, size = weight_of(self.symbols), self.num_nonterminals
        nonterminals, preterminals = symbols[:size], symbols[size:]
        parents = self.parent(_with_latent(nonterminals, latent)).relu() + nonterminals
        left, right = (
            _softmax((side(symbols).relu() + symbols) @ parents.transpose(-1, -2), -2)
            for side in (self.left, self.right)
        )
        if latent is None:
            preterminals = self.preterminal_layers(preterminals) + preterminals
        root = (weight_of(self.root) @ nonterminals.t()).squeeze(0)
        if latent is not None:
            root = root.expand(len(latent), -1)
        return root, self.emission_head(_with_latent(preterminals, latent)), LowRankRules(None, left, right)


class SparseGrammar(nn.Module):
    """A list of rules, sorted by A, and a score of each: p(A -> B C) = softmax over the rules of A.

    Root and words have scores of their own; no symbol has a vector. Rules that nobody gave fill the cube of all rules.
    """

    rules: Tensor

    def __init__(self, config: PCFGConfig) -> None:
        super().__init__()
        self.sizes = config.num_nonterminals, config.num_preterminals
        self.root_scores = nn.Parameter(torch.zeros(config.num_nonterminals))
        self.rule_scores = nn.Parameter(torch.zeros(config.num_rules))
        self.emission_head = nn.Sequential(nn.Linear(config.num_preterminals, config.vocab_size, bias=False))
        symbols, each = sum(self.sizes), -(-config.num_rules // config.num_nonterminals)
        place = torch.arange(config.num_rules)
        pair = symbols**2 - 1 - place % each
        self.register_buffer("rules", torch.stack([place // each, pair // symbols, pair % symbols]))

    def forward(self, latent: None) -> tuple[Tensor, Tensor, SparseRules]:
        """See `DenseGrammar`; there is no z."""
        scores = widened(self.rule_scores)
        places = torch.stack([self.rules[0], torch.arange(len(scores), device=scores.device)])
        table = torch.sparse_coo_tensor(places, scores, (self.sizes[0], len(scores)), check_invariants=False)
        log_probs = torch.sparse.log_softmax(table.coalesce(), 1).values()
        return self.root_scores, weight_of(self.emission_head[-1]).t(), SparseRules(self.rules, log_probs, *self.sizes)


class LatentEncoder(nn.Module):
    """q(z | sentence) = N(mean, exp(log variance)): a bidirectional LSTM, its largest output over time, and Linear."""

    def __init__(self, config: PCFGConfig) -> None:
        super().__init__()
        width, size = config.encoder_embedding_size, config.encoder_hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.lstm = saved_whole(nn.LSTM(width, size, batch_first=True, bidirectional=True))
        self.parameters_head = nn.Linear(2 * size, 2 * config.latent_size)

    def forward(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log variance [B, Z] for words [B, T], which stand at the left end of their rows."""
        packed = pack_padded_sequence(self.embed_tokens(ids), lengths.cpu(), batch_first=True, enforce_sorted=False)
        with without_autocast("cpu"):  # not every CPU has an LSTM in half precision
            states, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, padding_value=-torch.inf)
        return self.parameters_head(states.amax(1)).chunk(2, -1)


GRAMMARS = {
    "dense": DenseGrammar,
    "tensor": TensorGrammar,
    "tensor_shared": TensorGrammar,
    "simple": SimpleGrammar,
    "sparse": SparseGrammar,
}


def _with_latent(vectors: Tensor, latent: Tensor | None) -> Tensor:
    """Vectors [N, D], or with z [B, Z] behind each [B, N, D + Z]."""
    if latent is None:
        return vectors
    shape = (len(latent), *vectors.shape)
    return torch.cat([vectors.expand(shape), latent[:, None].expand(-1, shape[1], -1)], -1)


def _softmax(scores: Tensor, dim: int) -> Tensor:
    """Probabilities in float32 or wider."""
    return widened(scores).softmax(dim)
