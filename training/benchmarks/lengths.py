# SPDX-License-Identifier: Apache-2.0
"""Time of a training step against the length of the sentences: table 5 of the GPST paper (Hu et al., ACL 2024).

    python training/benchmark.py --lengths --runs 3

All models have as many parameters, as far as the steps of their widths allow, and read as many tokens in a step, in
sentences of 128 to 1,024 tokens. A step is a forward and a backward pass. The models run in turn; a ratio is the median
over the rounds. URNNG stops at 256 tokens, as in the paper: its tables grow with the square of the length.
"""

import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from benchmarks.sides import Step, check_gradients, place, seconds, training_step
from benchmarks.train import FIRST_WORD, NO_DROPOUT, QUARTER, gpt2
from torch import Tensor, nn

import hf_synlm
from hf_synlm.training.tasks.inference_network import InferenceNetwork
from hf_synlm.training.tasks.variational import attach_network, variational_loss

LENGTHS, TOKENS, PARAMETERS = (128, 256, 512, 1024), 1024, 8_000_000
VOCABULARY, SAMPLES = 10000, 8


class Contender(NamedTuple):
    """A model: what makes it from its width, the widths that it can have, and the longest sentence that it reads."""

    build: Callable[[int], nn.Module]
    step: int
    longest: int = 1 << 20


def _gpst(width: int) -> nn.Module:
    """The quarter size of the other benchmarks, all of it as much wider."""
    sizes = ("hidden_size", "composition_size", "composition_intermediate_size", "score_size", "parser_size")
    scaled = {name: QUARTER[name] * width // QUARTER["hidden_size"] for name in (*sizes, "parser_score_size")}
    return hf_synlm.GPSTForCausalLM(
        hf_synlm.GPSTConfig(**{**QUARTER, **scaled, "vocab_size": VOCABULARY}, **NO_DROPOUT)
    )


def _gpt2(width: int) -> nn.Module:
    return gpt2(hf_synlm.GPSTConfig(**{**QUARTER, "hidden_size": width, "vocab_size": VOCABULARY}))


def _awd_lstm(width: int) -> nn.Module:
    config = hf_synlm.PaLMConfig.from_preset(
        "awd-lstm-ptb", vocab_size=VOCABULARY, embedding_size=width, layer_size=width * 23 // 8
    )
    return hf_synlm.PaLMForCausalLM(config)


def _ordered_memory(width: int) -> nn.Module:
    return hf_synlm.OrderedMemoryForCausalLM(hf_synlm.OrderedMemoryConfig(vocab_size=VOCABULARY, hidden_size=width))


def _urnng(width: int) -> nn.Module:
    model = hf_synlm.URNNGForCausalLM(hf_synlm.URNNGConfig(vocab_size=VOCABULARY, hidden_size=width))
    attach_network(model, InferenceNetwork(width, max(8, width * 256 // 650), 1 << 10, 0.5))
    return model


MODELS = {
    "GPST": Contender(_gpst, 48),
    "GPT-2": Contender(_gpt2, 4),
    "AWD-LSTM": Contender(_awd_lstm, 8),
    "Ordered Memory": Contender(_ordered_memory, 2),
    "URNNG": Contender(_urnng, 2, longest=256),
}


def model_of_size(contender: Contender, parameters: int) -> nn.Module:
    """The model, with random weights, whose number of parameters is nearest to `parameters`."""

    def size(steps: int) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in contender.build(steps * contender.step).parameters())

    steps = 1
    while size(steps + 1) < parameters:
        steps += 1
    if size(steps + 1) - parameters < parameters - size(steps):
        steps += 1
    torch.manual_seed(0)
    return place(contender.build(steps * contender.step).train())


def step_of(model: Any, ids: Tensor) -> Step:
    """A training step of a model on sentences [B, T] of equal length."""
    if hasattr(model, "inference_network"):
        ended = torch.cat([ids, torch.full_like(ids[:, :1], model.config.eos_token_id)], 1)
        batch = {"input_ids": ended, "attention_mask": torch.ones_like(ended)}
        return training_step(model, lambda: variational_loss(model, model, batch, SAMPLES, 1.0, True)[0])
    return training_step(model, lambda: model(input_ids=ids, labels=ids).loss)


def time_by_length(
    runs: int, lengths: tuple[int, ...] = LENGTHS, tokens: int = TOKENS, parameters: int = PARAMETERS
) -> Iterator[dict[str, Any]]:
    """Median seconds of a step of every model at every length, timed in turn, and their ratio to the first model's."""
    built = {name: model_of_size(contender, parameters) for name, contender in MODELS.items()}
    generator = torch.Generator().manual_seed(1)
    for length in lengths:
        ids = place(torch.randint(FIRST_WORD, VOCABULARY, (tokens // length, length), generator=generator))
        steps = {name: step_of(model, ids) for name, model in built.items() if length <= MODELS[name].longest}
        for name, step in steps.items():
            step()
            check_gradients(built[name])
        rounds = [{name: seconds(step) for name, step in steps.items()} for _ in range(runs)]
        for name in steps:
            ratios = [times[name] / times[next(iter(MODELS))] for times in rounds]
            yield {
                "model": name,
                "parameters": sum(p.numel() for p in built[name].parameters()),
                "tokens of a sentence": length,
                "seconds": round(statistics.median(times[name] for times in rounds), 4),
                "ratio": round(statistics.median(ratios), 2),
            }
