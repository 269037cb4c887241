"""Exhaustive and one-action-at-a-time specifications of the search of GPST: one sentence, Python lists, no caches.

Every score is computed from scratch: the node sequence of a derivation is built action by action and run through the
layers in one causal pass.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch

GEN, COMP = 0, 1


def prefix_derivations(num_tokens: int) -> Iterator[tuple[int, ...]]:
    """All action sequences that end right after generating the last of the tokens."""

    def extend(actions: tuple[int, ...], depth: int, generated: int) -> Iterator[tuple[int, ...]]:
        if generated == num_tokens:
            yield actions
            return
        yield from extend((*actions, GEN), depth + 1, generated + 1)
        if depth >= 2:
            yield from extend((*actions, COMP), depth - 1, generated)

    yield from extend((), 0, 0)


def stack_depth(actions: tuple[int, ...]) -> int:
    """Trees on the stack after the actions."""
    return sum(1 if action == GEN else -1 for action in actions)


def complete_derivations(num_tokens: int) -> Iterator[tuple[int, ...]]:
    """All action sequences that build one tree over the tokens: nothing but COMP follows the last of them."""
    for actions in prefix_derivations(num_tokens):
        yield (*actions, *[COMP] * (stack_depth(actions) - 1))


@torch.no_grad()
def run(model: Any, tokens: list[int], actions: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a derivation through the model.

    Args:
        model: A `GPSTForCausalLM`.
        tokens: Tokens of the derivation, at least as many as it generates.
        actions: Its actions.

    Returns:
        Log-probabilities of the action after every slot [A + 1, 2], and of the word after every slot that a word
        follows, the last slot included [words + 1, V].
    """
    base = model.model
    inputs, positions, stack, generated, before_gen = [base.bos_embedding], [0], [], 0, []
    for slot, action in enumerate(actions):
        if action == GEN:
            before_gen.append(slot)
            embedding = base.embed_tokens(torch.tensor(tokens[generated]))
            generated += 1
            vector = base.down_scale(embedding)
            inputs.append(embedding)
        else:
            right, left = stack.pop(), stack.pop()
            vector = base.composition(left[None], right[None])[0]
            reduce_token = base.embed_tokens(torch.tensor(model.config.reduce_token_id))
            inputs.append(base.up_scale(vector) if model.config.surrogate else reduce_token)
        stack.append(vector)
        positions.append(generated)
    before_gen.append(len(actions))
    x = torch.stack(inputs) + base.position_embedding(torch.tensor(positions))
    hidden = base.type_layers(inputs_embeds=x[None]).last_hidden_state
    states = base.token_layers(inputs_embeds=hidden[:, before_gen]).last_hidden_state
    words = model.lm_head(model.heads.token(states))[0].float().log_softmax(-1)
    return model.heads.action(hidden)[0].float().log_softmax(-1), words


def log_prob(model: Any, tokens: list[int], actions: tuple[int, ...], renormalize: bool = False) -> float:
    """log p(actions, generated words), renormalized or not where COMP is illegal."""
    action_log_probs, words = run(model, tokens, actions)
    total, generated = 0.0, 0
    for slot, action in enumerate(actions):
        if not renormalize or stack_depth(actions[:slot]) >= 2:
            total += float(action_log_probs[slot, action])
        if action == GEN:
            total += float(words[generated, tokens[generated]])
            generated += 1
    return total


def log_sum_exp(values: list[float]) -> float:
    """Logarithm of the sum of the exponentials."""
    top = max(values, default=-math.inf)
    return top if top == -math.inf else top + math.log(sum(math.exp(value - top) for value in values))


def next_word_log_probs(model: Any, tokens: list[int]) -> torch.Tensor:
    """Exact log p(next word | tokens) [V]: every derivation of the prefix, every run of COMP after it."""
    terms = []
    for prefix in prefix_derivations(len(tokens)):
        for count in range(max(stack_depth(prefix), 1)):
            actions = (*prefix, *[COMP] * count)
            action_log_probs, words = run(model, tokens, actions)
            weight = log_prob(model, tokens, actions) + float(action_log_probs[-1, GEN])
            terms.append(weight + words[-1])
    return torch.stack(terms).logsumexp(0).log_softmax(-1)


def synchronous_beam(model: Any, tokens: list[int], num_beams: int) -> tuple[list[tuple], list[float]]:
    """The word-synchronous beam, one action at a time.

    At every step the pending derivations (which have generated as many words as the slowest) are extended by every
    legal action; the best `num_beams` of these and of those that are ahead are kept.

    Returns:
        The final beam, best first, and the prefix log-marginal after every word.
    """
    beam, marginals = [(0.0, ())], []
    for synced in range(len(tokens) + 1):
        while True:
            last = synced == len(tokens)
            pending = [x for x in beam if x[1].count(GEN) == synced and not (last and stack_depth(x[1]) == 1)]
            if not pending:
                break
            pool = [x for x in beam if x not in pending]
            for _, actions in pending:
                moves = ([] if last else [GEN]) + ([COMP] if stack_depth(actions) >= 2 else [])
                pool += [(log_prob(model, tokens, (*actions, move)), (*actions, move)) for move in moves]
            beam = sorted(pool, key=lambda x: -x[0])[:num_beams]
        if synced < len(tokens):
            marginals.append(log_sum_exp([score for score, _ in beam]))
    return sorted(beam, key=lambda x: -x[0]), marginals


def action_beam(model: Any, num_beams: int, num_words: int, eos: int | None = None) -> list[tuple]:
    """Beam search over single actions from nothing, the length not penalized.

    Every step ranks all expansions of all hypotheses, COMP and every word. Those that end the text do not take places
    in the beam, but must be among its best; those that reach the number of words leave it, closed by COMP.

    Returns:
        The best finished (score, words, actions), an end token among the words but not among the actions.
    """
    beam: list[tuple[float, list[int], tuple[int, ...]]] = [(0.0, [], ())]
    finished: list[tuple[float, list[int], tuple[int, ...]]] = []
    while beam and not (num_beams == 1 and finished):
        going, ending = [], []
        for score, tokens, actions in beam:
            depth = stack_depth(actions)
            action_log_probs, words = run(model, tokens, actions)
            gen, comp = action_log_probs[-1].tolist() if depth >= 2 else (0.0, -math.inf)
            if depth >= 2:
                going.append((score + comp, tokens, (*actions, COMP)))
            for token, value in enumerate(words[-1].tolist()):
                if token != eos:
                    going.append((score + gen + value, [*tokens, token], (*actions, GEN)))
                elif depth == 1:
                    ending.append((score + gen + value, [*tokens, token], actions))
        going = sorted(going, key=lambda x: -x[0])[:num_beams]
        ranked = sorted([*going, *ending], key=lambda x: -x[0])[:num_beams]
        finished += [x for x in ranked if x in ending]
        for _, tokens, actions in [x for x in ranked if x in going and len(x[1]) == num_words]:
            closed = (*actions, *[COMP] * (stack_depth(actions) - 1))
            finished.append((log_prob(model, tokens, closed, renormalize=True), tokens, closed))
        beam = [x for x in going if len(x[1]) < num_words]
    return sorted(finished, key=lambda x: -x[0])[:num_beams]
