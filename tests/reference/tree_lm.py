"""Tree LM and Transformer Grammars for one sentence, from the paper: a walk with a stack, and slow attention."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

SHIFT, REDUCE, FIRST = 1, 2, 3


class Position(NamedTuple):
    """One position of a linearized tree."""

    token: int
    depth: int
    sees: list[int]
    """Positions, itself last."""
    action: int
    """The action that wrote it, counted from 0; -1 at the begin token."""


def positions(actions: list[int], words: list[int], config: Any) -> list[Position]:
    """Linearize a derivation or a prefix of one."""
    if config.linearization != "top_down":  # one token for each action
        words, first = list(words), config.system.first_nonterminal
        tokens = [
            words.pop(0) if a == SHIFT else config.eos_token_id if a == 3 else config.vocab_size + a - first
            for a in actions
        ]
        tokens = [config.bos_token_id, *tokens]
        return [Position(token, place, list(range(place + 1)), place - 1) for place, token in enumerate(tokens)]
    num_labels, composes = len(config.nonterminals), config.structure_attention == "stack_compose"
    rows = [Position(config.bos_token_id, 0, [0], -1)]
    stack, opened, words = [0], [], list(words)  # opened: (place on the stack, depth, label)
    for number, action in enumerate(actions):
        label = action - FIRST
        if action == REDUCE:
            base, depth, label = opened.pop()
            token = config.vocab_size + num_labels + label
            rows.append(Position(token, depth, [*stack[base:], len(rows)], number))
            stack = [*stack[:base], len(rows) - 1]
            if composes:  # the second copy reads, and is never on the stack
                rows.append(Position(token, depth, [*stack, len(rows)], number))
            continue
        depth = len(opened) + 1
        if action != SHIFT:
            opened.append((len(stack), depth, label))
        token = words.pop(0) if action == SHIFT else config.vocab_size + label
        rows.append(Position(token, depth, [*stack, len(rows)], number))
        stack = [*stack, len(rows) - 1]
    if not composes:
        rows = [Position(row.token, place, list(range(place + 1)), row.action) for place, row in enumerate(rows)]
    return rows


def log_probs(model: Any, actions: list[int], words: list[int]) -> Tensor:
    """Log-probabilities [A, V + 2 Y] of the token that each action writes."""
    config, base = model.config, model.model
    rows = positions(actions, words, config)
    hidden = _embedded(base, rows)
    if config.backbone_config is not None:  # a decoder of transformers is its own reference
        hidden = base.backbone(inputs_embeds=hidden[None], use_cache=False).last_hidden_state[0]
    for layer in [] if config.backbone_config is not None else base.layers:
        hidden = _layer(layer, hidden, rows, config)
    logits = torch.cat([model.lm_head(hidden), model.label_head(hidden)], -1).log_softmax(-1)
    last = {row.action: place for place, row in enumerate(rows)}
    return torch.stack([logits[last[number - 1]] for number in range(len(actions))])


def attention_entropies(model: Any, actions: list[int], words: list[int], kind: str) -> list[float]:
    """Normalized attention entropy of the words of a derivation or a prefix of one, head by head."""
    config, base = model.config, model.model
    rows, found = positions(actions, words, config), []
    hidden, heads = _embedded(base, rows), config.num_attention_heads
    if config.backbone_config is None:
        for layer in base.layers[:-1]:
            hidden = _layer(layer, hidden, rows, config)
        attention = base.layers[-1].attention
        output, bias = attention.o_proj.weight.T, attention.o_proj.bias
    else:
        base.backbone.set_attn_implementation("eager")
        seen = base.backbone(inputs_embeds=hidden[None], use_cache=True, output_attentions=True)
        base.backbone.set_attn_implementation("sdpa")
        values, weights = seen.past_key_values.layers[-1].values[0], seen.attentions[-1][0]
        if config.backbone_config.model_type == "gpt2":
            output, bias = base.backbone.h[-1].attn.c_proj.weight, base.backbone.h[-1].attn.c_proj.bias
        else:
            output = base.backbone.layers[-1].self_attn.o_proj.weight.T
            bias = torch.zeros(output.shape[1])
    for place, row in enumerate(rows):
        if row.action < 0 or actions[row.action] != SHIFT:
            continue
        total, before = 0.0, row.sees[:-1]
        for head in range(heads):
            if config.backbone_config is None:
                seen_weights, seen_values = _weights(attention, hidden, rows, place, config)
                own = [(seen_weights[k, head], seen_values[k, head]) for k in range(len(before))]
            else:
                own = [(weights[head, place, k], values[head * len(values) // heads, k]) for k in before]
            if kind == "projected":
                size = len(output) // heads
                part = output[head * size : (head + 1) * size]
                own = [((weight * (value @ part + bias / heads)).norm(), value) for weight, value in own]
            shares = [float(weight) for weight, _ in own]
            shares = [share / sum(shares) for share in shares]
            if len(before) > 1:
                total -= sum(a * math.log2(a + 1e-10) for a in shares) / math.log2(len(before))
        found.append(total)
    return found


def _embedded(base: Any, rows: list[Position]) -> Tensor:
    return torch.cat([base.embed_tokens.weight, base.embed_labels.weight])[[row.token for row in rows]]


def _layer(layer: Any, hidden: Tensor, rows: list[Position], config: Any) -> Tensor:
    attended = torch.stack([_attend(layer.attention, hidden, rows, place, config) for place in range(len(rows))])
    hidden = layer.attention_norm(hidden + attended)
    inner = torch.nn.functional.gelu(layer.up_proj(hidden), approximate="tanh")
    return layer.feed_forward_norm(hidden + layer.down_proj(inner))


def _attend(attention: Any, hidden: Tensor, rows: list[Position], place: int, config: Any) -> Tensor:
    """What one position attends to."""
    weights, values = _weights(attention, hidden, rows, place, config)
    return attention.o_proj((weights[..., None] * values).sum(0).flatten())


def _weights(attention: Any, hidden: Tensor, rows: list[Position], place: int, config: Any) -> tuple[Tensor, Tensor]:
    """Weights [S, H] and values [S, H, d] of what one position sees, pair by pair."""
    size = config.hidden_size // config.num_attention_heads
    query, sees = attention.q_proj(hidden[place]), rows[place].sees
    scores = []
    for column in sees:
        distance = rows[place].depth - rows[column].depth
        if config.structure_attention == "stack_compose":
            distance = min(max(distance, config.min_relative_position), config.max_relative_position)
        angles = distance * 10000.0 ** (
            -torch.arange(0, config.hidden_size, 2, dtype=hidden.dtype) / config.hidden_size
        )
        relative = attention.relative_proj(torch.cat([angles.sin(), angles.cos()]))
        by_content = (query + attention.content_bias) * attention.k_proj(hidden[column])
        by_position = (query + attention.position_bias) * relative
        scores.append((by_content + by_position).view(-1, size).sum(1) / size**0.5)
    return torch.stack(scores).softmax(0), attention.v_proj(hidden[sees]).view(len(sees), -1, size)
