"""PRPN and PRPN-SYD by definition: one token at a time, one sentence after the other, no tensor wider than a vector.

Only the batch normalizations see all tokens of a batch. Masks of dropout are given in the order in which the model
draws them; `Masks` hands them out, and 1 without dropout.
"""

import math

import torch
from torch.nn import functional as F

FAR = 1e4


class Masks:
    """The masks of one call of the model, in order."""

    def __init__(self, masks=()):
        self.rest = list(masks)
        self.any = bool(self.rest)

    def next(self):
        return self.rest.pop(0) if self.any else None


def at(mask, *place):
    return 1.0 if mask is None else mask[place]


def batch_norm(norm, vectors, training):
    """Normalize a list of vectors, with their own statistics in training."""
    mean, variance = norm.running_mean, norm.running_var
    if training:
        mean = sum(vectors) / len(vectors)
        variance = sum((v - mean) ** 2 for v in vectors) / len(vectors)
    return [(v - mean) / (variance + norm.eps).sqrt() * norm.weight + norm.bias for v in vectors]


def layer_norm(norm, v):
    return norm.weight * (v - v.mean()) / (v.std() + 1e-6) + norm.bias


def linear(layer, v):
    return layer.weight @ v + layer.bias


def alpha(own, gap, config):
    difference = (own - gap) / config.resolution
    return (difference + 1).clamp(0, 1) if config.gate == "hard" else (10 * difference + 5).sigmoid()


def gates(own, distances, config):
    """Gates of the slots before a token, the newest first; `distances` end with that of the token itself."""
    values, gate = [], torch.ones_like(own)
    for slot in range(config.num_slots):
        gate = gate * alpha(own, distances[-1 - slot] if slot < len(distances) else torch.tensor(FAR), config)
        values.append(gate)
    return values


def attend(key, states, gate):
    """Weights of the slots, the newest first; there is a state for every slot."""
    logits = [state @ key / math.sqrt(len(key)) for state in states]
    top = max(logit.item() for logit in logits)
    top = next(logit for logit in logits if logit.item() == top)
    scores = [(logit - top).exp() * g for logit, g in zip(logits, gate, strict=True)]
    return [score / (sum(scores) + 1e-8) for score in scores]


def lookback_features(module, inputs, order, masks, training):
    """Features of every token (time, sentence) of `order` from its vector and those before it."""
    convolution, before = module.convolution, []
    length = convolution.kernel_size[0]
    for time, row in order:
        zero = torch.zeros_like(inputs[row][0])
        window = [inputs[row][t] if t >= 0 else zero for t in range(time - length + 1, time + 1)]
        # [H, E, L + 1]: the last slice belongs to the token itself.
        before.append(sum(convolution.weight[:, :, x] @ v for x, v in enumerate(window)) + convolution.bias)
    mask = masks.next()
    normalized = batch_norm(module.norm, before, training)
    return [F.relu(v) * at(mask, place) for place, v in enumerate(normalized)]


def lstm(module, inputs):
    """Outputs of a one-layer LSTM over one sentence."""
    h = c = torch.zeros_like(module.bias_ih_l0[: module.hidden_size])
    outputs = []
    for x in inputs:
        z = module.weight_ih_l0 @ x + module.bias_ih_l0 + module.weight_hh_l0 @ h + module.bias_hh_l0
        i, f, g, o = z.chunk(4)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        outputs.append(h)
    return outputs


def by_sentence(values, order, lengths):
    rows = [[None] * length for length in lengths]
    for (time, row), value in zip(order, values, strict=True):
        rows[row][time] = value
    return rows


def convolutional_distances(parser, embedded, order, masks, training):
    """(d, d') of every token of every sentence."""
    mask, lookback = masks.next(), parser.features.convolution.kernel_size[0] - 1
    dropped = [[e * at(mask, lookback + t, b) for t, e in enumerate(row)] for b, row in enumerate(embedded)]
    features = lookback_features(parser.features, dropped, order, masks, training)
    weight, bias = parser.score.weight[:, :, 0], parser.score.bias
    pairs = []
    for feature in features:
        first, second = feature.chunk(2)
        pairs.append(((weight[0] @ first + bias[0]).sigmoid(), (weight[1] @ second + bias[1]).sigmoid()))
    return by_sentence(pairs, order, [len(row) for row in embedded])


def recurrent_distances(parser, embedded, order, masks, training):
    """(d, d', d_syd) of every token of every sentence."""
    lengths, lookback = [len(row) for row in embedded], parser.features.convolution.kernel_size[0] - 1
    mask = masks.next()
    words = [lstm(parser.word_lstm, [e * at(mask, t, b) for t, e in enumerate(row)]) for b, row in enumerate(embedded)]
    mask = masks.next()
    dropped = [[h * at(mask, lookback + t, b) for t, h in enumerate(row)] for b, row in enumerate(words)]
    local = by_sentence(lookback_features(parser.features, dropped, order, masks, training), order, lengths)
    states = [lstm(parser.distance_lstm, row) for row in local]
    mask = masks.next()

    def head(layers, v):
        return linear(layers[2], F.relu(linear(layers[0], v)))

    rows = []
    for b, row in enumerate(states):
        dropped = [s * at(mask, t, b) for t, s in enumerate(row)]
        rows.append(
            [(*head(parser.language_model_head, s).sigmoid(), head(parser.supervised_head, s)[0]) for s in dropped]
        )
    return rows


def read(layer, sentences, gates_of_sentences, slots, masks):
    """States of one reading layer for every token of every sentence."""
    key_x, x_mask, key_h, key_mask, recurrent = (masks.next() for _ in range(5))
    size = layer.recurrent.in_features
    outputs = []
    for b, sentence in enumerate(sentences):
        h = [torch.zeros(size, dtype=sentence[0].dtype)] * slots  # newest first
        c = list(h)
        states = []
        for t, x in enumerate(sentence):
            joint = torch.cat([x * at(key_x, t, b), h[0] * at(key_h, t, b)])
            key = linear(layer.key, joint) * at(key_mask, t, b)
            weights = attend(key, h, gates_of_sentences[b][t])
            past_h = sum(w * v for w, v in zip(weights, h, strict=True))
            past_c = sum(w * v for w, v in zip(weights, c, strict=True))
            recurrent_mask = 1.0 if recurrent is None else recurrent
            z = layer_norm(layer.input_norm, linear(layer.input, x * at(x_mask, t, b)))
            z = z + layer_norm(layer.recurrent_norm, linear(layer.recurrent, past_h * recurrent_mask))
            i, f, g, o = z.chunk(4)
            new_c = f.sigmoid() * past_c + i.sigmoid() * g.tanh()
            new_h = o.sigmoid() * layer_norm(layer.cell_norm, new_c).tanh()
            h, c = [new_h, *h[:-1]], [new_c, *c[:-1]]
            states.append(new_h)
        outputs.append(states)
    return outputs


def predict(predictor, sentences, gates_of_sentences, slots, order, masks, training):
    """Features of the next token, for every token of every sentence."""
    hidden_mask, key_mask = masks.next(), masks.next()
    rows = []
    for t, b in order:
        states = sentences[b]
        key = linear(predictor.key, states[t] * at(hidden_mask, t, b)) * at(key_mask, t, b)
        zero = torch.zeros_like(states[t])
        before = [states[t - 1 - slot] if t > slot else zero for slot in range(slots)]
        weights = attend(key, before, gates_of_sentences[b][t])
        rows.append(torch.cat([states[t], sum(w * v for w, v in zip(weights, before, strict=True))]))
    for block in predictor.blocks:
        mask = masks.next()
        inner = batch_norm(block.inner_norm, [linear(block.inner, u) for u in rows], training)
        inner = [F.relu(v) * at(mask, place) for place, v in enumerate(inner)]
        outer = batch_norm(block.outer_norm, [linear(block.outer, v) for v in inner], training)
        rows = [F.relu(v + u) for v, u in zip(outer, rows, strict=True)]
    mask = masks.next()
    features = [linear(predictor.output, u * at(mask, place)) for place, u in enumerate(rows)]
    features = [v.tanh() for v in batch_norm(predictor.output_norm, features, training)]
    return by_sentence(features, order, [len(row) for row in sentences])


def prpn(model, sentences, masks=(), training=False):
    """Run a language model on whole sentences.

    Args:
        model: whose parameters and configuration are used.
        sentences: lists of token ids.
        masks: of dropout, in the order in which the model draws them.
        training: batch normalizations use the statistics of these tokens.

    Returns:
        Per sentence and token log p(next token | prefix) [V], and (d, d') or (d, d', d_syd).
    """
    config, network, masks = model.config, model.model, Masks(masks)
    embedded = [[network.embed_tokens.weight[token] for token in sentence] for sentence in sentences]
    longest = max(map(len, sentences))
    order = [(t, b) for t in range(longest) for b, sentence in enumerate(sentences) if t < len(sentence)]
    parse = convolutional_distances if config.parsing_network == "convolution" else recurrent_distances
    distances = parse(network.parser, embedded, order, masks, training)

    def gates_with(which):
        return [
            [gates(token[which], [d[0] for d in row[: t + 1]], config) for t, token in enumerate(row)]
            for row in distances
        ]

    reading, predicting = gates_with(0), gates_with(1)
    hidden = embedded
    for layer in network.layers:
        hidden = read(layer, hidden, reading, config.num_slots, masks)
    features = predict(network.predictor, hidden, predicting, config.num_slots, order, masks, training)
    mask = masks.next()
    log_probs = [
        [linear(model.lm_head, v * at(mask, b, t)).log_softmax(-1) for t, v in enumerate(row)]
        for b, row in enumerate(features)
    ]
    assert not masks.rest, "the model drew more masks"
    return log_probs, distances
