# SPDX-License-Identifier: Apache-2.0
"""Trees of given sentences: of minimum Bayes risk, of the best derivation, and drawn from the posterior.

Shapes: B sentences, T words, R drawn trees, Y nonterminals, X preterminals, S symbols.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_synlm.core.binary_trees import BinaryTrees
from hf_synlm.models.pcfg.configuration_pcfg import PCFGConfig
from hf_synlm.models.pcfg.inside import IMPOSSIBLE, Chart, Grammar, children, in_full_precision, inside
from hf_synlm.models.pcfg.rules import DenseRules, LowRankRules, draw, padded
from hf_synlm.trees.spans import Span

# Most entries of a table of rules that `viterbi` builds: 256 MB in float32.
_MAX_TABLE = 1 << 26


@dataclass
class Derivation:
    """A tree with its symbols."""

    spans: list[Span]
    """In post-order."""
    nonterminals: list[int]
    """Of the spans."""
    preterminals: list[int]
    """Of the words."""

    @property
    def nodes(self) -> list[tuple[Span, int]]:
        """The spans with their nonterminals."""
        return list(zip(self.spans, self.nonterminals, strict=True))


@in_full_precision
def span_posteriors(grammar: Grammar, log_emission: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Log p(sentence) [B] and the posteriors [B, T + 1, T + 1] of spans (i, j) of two or more words.

    They are the gradient of log p with respect to the logarithm of a span's scale: one backward pass.
    """
    with torch.enable_grad():
        chart = inside(grammar, log_emission.clone().requires_grad_())
        log_prob = chart.whole.gather(1, lengths[:, None] - 1).squeeze(1)
        longer = lengths > 1
        values = chart.values if longer.any() else []
        gradients = torch.autograd.grad(log_prob[longer].sum(), values) if values else ()
    num_words = log_emission.shape[1]
    posteriors = log_emission.new_zeros(len(lengths), num_words + 1, num_words + 1)
    for width, (value, gradient) in enumerate(zip(chart.values, gradients, strict=True), 2):
        posteriors.diagonal(width, 1, 2).copy_((value.detach() * gradient).sum(-1))
    return log_prob.detach(), posteriors


def best_trees(posteriors: Tensor, lengths: Tensor) -> list[list[Span]]:
    """The binary trees with the highest sum of posteriors, in post-order; at ties the left part is the shortest."""
    tables = BinaryTrees(posteriors[:, :-1, 1:], lengths).argmax()
    spans = [[(i, j + 1) for j, i in table.t().nonzero().tolist() if i < j] for table in tables]
    return [sorted(tree, key=_post_order) for tree in spans]


def _post_order(span: Span) -> tuple[int, int]:
    return span[1], -span[0]


def tree_log_probs(grammar: Grammar, log_emission: Tensor, lengths: Tensor, trees: list[list[Span]]) -> Tensor:
    """Log p(sentence, tree) [B] of binary trees, labels summed out."""
    size = log_emission.shape[1] + 1
    places = [[row, i, j] for row, tree in enumerate(trees) for i, j in tree]
    allowed = torch.zeros(len(trees), size, size, dtype=torch.bool)
    if places:
        allowed[tuple(torch.tensor(places).t())] = True
    chart = inside(grammar, log_emission, allowed.to(log_emission.device))
    return chart.whole.gather(1, lengths[:, None] - 1).squeeze(1)


# -------------------------------------------------------------------------------------------------- best derivation
def viterbi(grammar: Grammar, log_emission: Tensor, lengths: Tensor) -> tuple[list[Derivation], Tensor]:
    """The best derivations, and their log-probabilities [B].

    Ties: the smallest split, then the smallest pair of children. A table of the rules that would be too large raises
    ValueError. Cost: O(n^3 S^2 + n^2 Y S^2); of a list of rules as `inside`.
    """
    rules, num_preterminals = grammar.rules, log_emission.shape[2]
    if isinstance(rules, LowRankRules):
        entries = rules.size * (rules.size + num_preterminals) ** 2
        if entries > _MAX_TABLE:
            raise ValueError(
                f"method 'viterbi' needs a table of {entries:,} rules, more than {_MAX_TABLE:,}. Use 'mbr' or 'sample'."
            )
        rules = DenseRules(rules.table())
    words, best = log_emission, list[Tensor]()
    for width in range(2, log_emission.shape[1] + 1):
        count = log_emission.shape[1] - width + 1
        best.append(rules.best(words[:, :count], words[:, -count:], *children(best, best, count)))
    rows = torch.arange(len(lengths), device=lengths.device)
    none = grammar.root.new_full((len(lengths), rules.size), -torch.inf)  # no sentence has one word
    sentence = torch.stack([none, *(part[:, 0] for part in best)], 1)
    score, start = (sentence[rows, lengths - 1] + grammar.root.log()).max(1)
    found = []
    for row, (size, symbol) in enumerate(zip(lengths.tolist(), start.tolist(), strict=True)):
        own = padded(log_emission[row], [part[row] for part in best], rules.size)
        found.append(_read_back(rules.of_rows(rows[row]), own, size, symbol))
    return found, score


def _read_back(rules: DenseRules, best: list[Tensor], size: int, symbol: int) -> Derivation:
    """The best derivation of a sentence from the log-probabilities [K, S] of its spans, by width."""
    nodes, words, agenda = [], [0] * size, [(0, size, symbol)] if size > 1 else []
    while agenda:
        i, j, symbol = agenda.pop()
        if j - i == 1:
            words[i] = symbol - rules.size
            continue
        nodes.append(((i, j), symbol))
        first, second, probs = rules.children(symbol)
        left = torch.stack([best[k - i - 1][i, first] for k in range(i + 1, j)])
        right = torch.stack([best[j - k - 1][k, second] for k in range(i + 1, j)])
        split, rule = divmod(int((left + right + probs.log()).argmax()), len(probs))
        agenda += [(i, i + 1 + split, int(first[rule])), (i + 1 + split, j, int(second[rule]))]
    return _derivation(nodes, words)


def constituents(config: PCFGConfig, nodes: list[tuple[Span, int]], words: list[int]) -> list[tuple[Span, str]]:
    """Spans with labels in post-order, chains from the bottom up; `words` are the preterminals."""
    labels, size = config.labels, config.num_nonterminals
    chains = [(span, labels[symbol]) for span, symbol in nodes]
    chains += [((i, i + 1), labels[size + symbol][:-1]) for i, symbol in enumerate(words)]
    found = [(span, label) for span, chain in chains for label in reversed(chain)]
    return sorted(found, key=lambda node: _post_order(node[0]))


def _derivation(nodes: list[tuple[Span, int]], words: list[int]) -> Derivation:
    nodes = sorted(nodes, key=lambda node: _post_order(node[0]))
    return Derivation([span for span, _ in nodes], [symbol for _, symbol in nodes], words)


# ------------------------------------------------------------------------------------------------------- sampling
@in_full_precision
def sample(grammar: Grammar, log_emission: Tensor, lengths: Tensor, count: int) -> tuple[list[Derivation], Tensor]:
    """Draw `count` derivations of every sentence from the posterior: R = B `count`, and log p of each [R].

    Cost: n - 1 steps of O(R n S^2), or O(R n S r).
    """
    rules, size = grammar.rules, grammar.rules.size
    symbols, scale = _all_symbols(grammar, inside(grammar, log_emission))
    sentence = torch.arange(len(lengths), device=lengths.device).repeat_interleave(count)
    length, rows = lengths[sentence], torch.arange(len(sentence), device=lengths.device)
    root = grammar.root if grammar.root.dim() == 1 else grammar.root[sentence]
    symbol = draw(symbols[sentence, 0, length, :size] * root)
    agenda = torch.stack([torch.zeros_like(length), length, symbol], 1)[:, None]  # [R, N, 3] begin, end, symbol
    nodes, log_prob = [], root.expand(len(rows), -1)[rows, symbol].log()
    for _ in range(int(length.max()) - 1):
        # Every row expands one constituent, as long as it has one.
        begin, end = agenda[..., 0], agenda[..., 1]
        open_, place = (end - begin).max(1)
        active = (open_ > 1).nonzero()[:, 0]
        place = place[active]
        i, j, parent = agenda[active, place].unbind(1)
        left, right = symbols[sentence[active], i], symbols[sentence[active], :, j]
        both = scale[sentence[active], i] + scale[sentence[active], :, j]
        weight = (both - both.amax(1, keepdim=True)).exp()
        split, first, second, prob = rules.of_rows(sentence[active]).sample_split(parent, left, right, weight)
        log_prob[active] += prob.log()
        nodes += list(zip(active.tolist(), i.tolist(), j.tolist(), parent.tolist(), strict=True))
        agenda = torch.cat([agenda, torch.zeros_like(agenda[:, :1])], 1)
        agenda[active, place] = torch.stack([i, split, first], 1)
        agenda[active, -1] = torch.stack([split, j, second], 1)
    words = [[0] * n for n in length.tolist()]
    for row, column in (agenda[..., 1] - agenda[..., 0] == 1).nonzero().tolist():
        i, _, symbol = agenda[row, column].tolist()
        words[row][i] = symbol - size
    given = log_emission[sentence]
    for row, tags in enumerate(words):
        log_prob[row] += given[row, torch.arange(len(tags)), torch.tensor(tags)].sum()
    trees: list[list[tuple[Span, int]]] = [[] for _ in words]
    for row, i, j, symbol in nodes:
        trees[row].append(((i, j), symbol))
    return [_derivation(*pair) for pair in zip(trees, words, strict=True)], log_prob


def _all_symbols(grammar: Grammar, chart: Chart) -> tuple[Tensor, Tensor]:
    """Inside probabilities [B, T + 1, T + 1, S] of spans (i, j), and their log scales, far below 0 where i >= j."""
    count, num_words, num_preterminals = chart.emission.shape
    size = grammar.rules.size
    symbols = chart.emission.new_zeros(count, num_words + 1, num_words + 1, size + num_preterminals)
    scale = chart.emission.new_full(symbols.shape[:3], IMPOSSIBLE)
    for width, part in enumerate(chart.scale, 1):
        scale.diagonal(width, 1, 2).copy_(part)
        places = symbols.diagonal(width, 1, 2).transpose(1, 2)  # [B, K, S]
        if width == 1:
            places[..., size:] = chart.emission
        else:
            places[..., :size] = grammar.rules.symbols(chart.values[width - 2])
    return symbols, scale
