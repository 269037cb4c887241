"""Floating point operations of training, by formula from a configuration.

The formulas count the matrix products that a model needs, as in Chowdhery et al. (2022, appendix B): two operations per
multiplication and addition; three times the forward pass for training (a backward pass has two products for each of
the forward pass); attention over all slots of a row (no halving for causality). Recomputed activations do not count:
the share of a device's peak by this count is the model FLOP utilization. `tests/training/test_flops.py` compares
with the products that PyTorch computes.

D hidden size, d composition size, V vocabulary, T tokens of a context, n tokens of a sentence; see the configurations
for the other sizes.
"""

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_synlm import GPSTConfig, RNNGConfig
from hf_synlm.models.gpst.chart import plan_chart


def chart_counts(window_size: int, context_length: int, sentence_length: int) -> tuple[float, float]:
    """Cells and compositions per token of a chart, counted for random merge orders.

    Args:
        window_size: of the pruned chart.
        context_length: tokens of the context.
        sentence_length: tokens of each sentence, but for the last one.

    Returns:
        Inner cells and compositions per token; below 3 and 5 for window 2.
    """
    order = torch.rand(1, context_length - 1, generator=torch.Generator().manual_seed(0)).argsort(1)
    sentence_ids = torch.arange(context_length)[None] // sentence_length + 1
    plan = plan_chart(order, sentence_ids, window_size)
    compositions = sum((last - first) * num_splits for first, last, num_splits in plan.levels)
    return (plan.num_cells - plan.num_leaves) / context_length, compositions / context_length


def gpst_flops_per_token(config: GPSTConfig, context_length: int, sentence_length: int = 24) -> float:
    """FLOPs of training per token of a full context.

    Forward, in multiplications and additions per token, with s = 2 - 1 / n slots of the type layers, c cells and k
    compositions (`chart_counts`), i the feed-forward width of the pair layers (which see two positions each), and N, M
    of these layers inside and outside:

        type layers     s (4 D^2 + 2 D I + 2 s T D) each;      token layers the same with s = 1
        vocabulary      2 V D (token, auto-encoding)
        heads           8 D^2;  4 d^2 + 4 d D;  s (D^2 + 2 D);  scaling 2 d D
        inside          k (2 N (4 d^2 + 2 d i) + 2 (d^2 + d score))
        outside         (c + 1) (3 d^2 + 2 (d^2 + d score)) + c (4 d^2 + d score)
                        + 2 k (2 (d^2 + 2 d i) + (M - 1) 2 (4 d^2 + 2 d i))
        parser          (4 p^2 + 3 p j + 2 T p) each, j its feed-forward width;  2 p q + q for the scores

    Training takes three times that, but four times the inside pass: its gradients come in two channels. One of them
    does not reach the split scores, and the products for the inputs are computed for both.

    Args:
        config: of the model.
        context_length: T.
        sentence_length: n, on average; OpenWebText has about 24 word pieces.

    Returns:
        FLOPs per token.
    """
    D, d, T = config.hidden_size, config.composition_size, context_length
    wide = config.intermediate_size or 4 * D
    n, q = min(sentence_length, T), config.score_size
    slots = 2 - 1 / n
    cells, splits = chart_counts(config.window_size, T, n)
    pair = 4 * d**2 + 2 * d * config.composition_intermediate_size
    type_layer = slots * (4 * D**2 + 2 * D * wide + 2 * slots * T * D)
    token_layer = 4 * D**2 + 2 * D * wide + 2 * T * D
    heads = 8 * D**2 + 4 * d**2 + 4 * d * D + slots * (D**2 + 2 * D) + 2 * d * D
    inside = splits * (2 * config.num_composition_layers * pair + 2 * (d**2 + d * q))
    messages = 2 * (pair - 3 * d**2) + (config.num_decomposition_layers - 1) * 2 * pair
    outside = (cells + 1) * (5 * d**2 + 2 * d * q) + cells * (4 * d**2 + d * q) + 2 * splits * messages
    p, j = config.parser_size, 256 * -(-int(8 * config.parser_size / 3) // 256)
    parser = config.num_parser_layers * (4 * p**2 + 3 * p * j + 2 * T * p)
    parser += 2 * p * config.parser_score_size + config.parser_score_size
    layers = config.num_type_layers * type_layer + config.num_token_layers * token_layer
    forward = layers + 2 * config.vocab_size * D + heads + inside + outside + parser
    return 2 * (3 * forward + inside)


def rnng_flops_per_token(config: RNNGConfig, actions_per_token: float) -> float:
    """FLOPs of training per token of a derivation.

    With a actions per token, r = (a - 1) / 2 nonterminals per token, every action pushes one element; w is the
    embedding size, h the hidden size, in multiplications and additions per token:

        stack LSTM      a 4 h (w + h), further layers a 8 h^2
        heads           a (h w + w A) + w V
        composition     8 w^2 per input of its two LSTMs, 1 + r children and (LSTM composition) r labels; 8 w^2 per
                        step after the first; 2 w^2 per nonterminal, with attention 4 w^2 (keys), 8 w^2 (gate) more

    Args:
        config: of the model.
        actions_per_token: of the training trees.

    Returns:
        FLOPs per token.
    """
    w, h, a = config.embedding_size, config.hidden_size, actions_per_token
    nonterminals = (a - 1) / 2
    stack = a * (4 * h * (w + h) + (config.num_layers - 1) * 8 * h**2)
    heads = a * (h * w + w * config.num_actions) + w * config.vocab_size
    if config.composition == "lstm":
        composition = (2 + 3 * nonterminals) * 8 * w**2 + nonterminals * 2 * w**2
    else:
        composition = (2 + nonterminals) * 8 * w**2 + nonterminals * 14 * w**2
    return 6 * (stack + heads + composition)


def recurrent_flops_per_token(model: PreTrainedModel) -> float:
    """FLOPs of training per token of a network that uses every weight matrix once per token: 6 N (Kaplan et al. 2020).

    Embeddings are looked up and do not count; the output layer counts. For LSTM, ON-LSTM, PRPN and PaLM. Products of
    states with states (PRPN's and PaLM's attention) are a few per cent and left out. Ordered Memory uses the matrices
    of its cell and of its keys once per slot.

    Args:
        model: a causal language model with `lm_head`.

    Returns:
        FLOPs per token.
    """
    embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    left_out = {id(weight) for weight in (*embeddings, model.lm_head.weight)}
    matrices = [p for p in model.parameters() if p.dim() > 1 and id(p) not in left_out]
    total = sum(matrix.numel() for matrix in matrices) + model.lm_head.weight.numel()
    if model.config.model_type == "ordered_memory":
        layer = model.model.layer
        by_slot = sum(linear.weight.numel() for linear in (layer.key, layer.cell_in, layer.cell_out))
        total += (model.config.num_slots - 1) * by_slot
    return 6.0 * total


def decoder_flops_per_token(model: PreTrainedModel, context_length: int) -> float:
    """FLOPs of training per token of a Transformer decoder: 6 N + 12 L D T (Chowdhery et al. 2022, appendix B).

    Args:
        model: with `lm_head`; N counts its matrices without embeddings, L its layers, D its width.
        context_length: T.

    Returns:
        FLOPs per token.
    """
    config = model.config
    return recurrent_flops_per_token(model) + 12 * config.num_hidden_layers * config.hidden_size * context_length
