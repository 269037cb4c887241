"""Speed of the models as ratios against a baseline that runs in turn with them.

    python training/benchmark.py --list
    python training/benchmark.py --case gpst-train-quarter --runs 7 --json

Every case builds both sides with the same width, layers, vocabulary and tokens, checks that the measured side computes
the right thing (and refuses to report if it does not), then times the two sides alternately: A B A B. The ratio is the
median of the pairs, so a machine that changes its speed changes it little. Times are wall-clock; peak memory is the
highest resident set of a fresh process that runs one step of one side, minus what it held before the step (Linux).
"""

import argparse
import dataclasses
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_synlm import GPSTConfig, GPSTForCausalLM

Step = Callable[[], object]
SENTENCE_LENGTHS = (8, 45)  # tokens per sentence of the training contexts, half-open
BEAM, PARSE_TOKENS = 20, 30
NO_DROPOUT = dict.fromkeys(
    (
        "embedding_dropout",
        "residual_dropout",
        "attention_dropout",
        "composition_dropout",
        "composition_attention_dropout",
        "parser_dropout",
        "head_dropout",
    ),
    0.0,
)
QUARTER = {
    "vocab_size": 12566,
    "hidden_size": 192,
    "num_attention_heads": 4,
    "composition_size": 64,
    "composition_num_heads": 4,
    "composition_intermediate_size": 256,
    "score_size": 32,
    "parser_size": 32,
    "parser_score_size": 128,
    "parser_num_heads": 4,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "reduce_token_id": 3,
    "cls_token_id": 4,
    "sep_token_id": 5,
}
FIRST_WORD = 10  # ids below are special tokens of the quarter configuration


@dataclasses.dataclass(frozen=True)
class Case:
    """One comparison: what is measured, against what, and how both sides are built."""

    name: str
    what: str
    baseline: str
    build: Callable[[], tuple[Step, Step, Step]]
    """Makes the measured step, the baseline's step and the correctness check (which raises)."""


def _gpt2(config: GPSTConfig) -> GPT2LMHeadModel:
    """GPT-2 of the same width, heads, layers and vocabulary, as transformers has it."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.max_position_embeddings,
            n_embd=config.hidden_size,
            n_layer=config.num_hidden_layers,
            n_head=config.num_attention_heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=None,
            pad_token_id=0,
        )
    )


def packed_contexts(num_contexts: int, num_tokens: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Full contexts of random tokens, cut into sentences of random length.

    Args:
        num_contexts: rows.
        num_tokens: columns.
        vocab_size: ids are drawn from the words of the vocabulary.

    Returns:
        Token ids and sentence numbers, each [rows, columns].
    """
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(FIRST_WORD, vocab_size, (num_contexts, num_tokens), generator=generator)
    sentence_ids = torch.zeros_like(ids)
    for row in sentence_ids:
        start, number = 0, 1
        while start < num_tokens:
            length = int(torch.randint(*SENTENCE_LENGTHS, (1,), generator=generator))
            row[start : start + length] = number
            start, number = start + length, number + 1
    return ids, sentence_ids


def gpst_train(overrides: dict, num_contexts: int, num_tokens: int) -> tuple[Step, Step, Step]:
    """Forward and backward of the whole objective against GPT-2's language-modeling loss on the same tokens.

    Args:
        overrides: fields of the configuration that differ from the small preset.
        num_contexts: contexts per step.
        num_tokens: tokens per context.

    Returns:
        The measured step, the baseline's step and the check.
    """
    torch.manual_seed(0)
    config = GPSTConfig(**overrides, **NO_DROPOUT, merge_noise=0.0)
    model, baseline = GPSTForCausalLM(config).train(), _gpt2(config).train()
    ids, sentence_ids = packed_contexts(num_contexts, num_tokens, config.vocab_size)

    def ours() -> torch.Tensor:
        model.zero_grad()
        loss = model(ids, sentence_ids=sentence_ids, labels=ids).loss
        loss.backward()
        return loss

    def theirs() -> torch.Tensor:
        baseline.zero_grad()
        loss = baseline(ids, labels=ids).loss
        loss.backward()
        return loss

    def check() -> None:
        # The token loss again from full logits, the whole loss again sentence by sentence in contexts of their own.
        model.eval()
        output = model(ids, sentence_ids=sentence_ids, labels=ids)
        with torch.no_grad():
            given = model(ids, sentence_ids=sentence_ids, output_chart=True)
            log_prob = given.token_logits_given_tree.log_softmax(-1).gather(-1, ids[..., None])
        torch.testing.assert_close(output.losses["token"], -log_prob.mean(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(output.joint_log_prob, given.joint_log_prob, rtol=1e-4, atol=1e-2)
        first = ids[:1, : int((sentence_ids[0] == 1).sum())]
        alone = [span for span in given.spans[0] if span[1] <= first.shape[1]]
        with torch.no_grad():
            single = model(first, output_chart=True)
        if single.spans[0] != alone:
            raise AssertionError("a sentence has another tree alone than in its context")
        model.train()
        ours()
        unused = [name for name, parameter in model.named_parameters() if parameter.grad is None]
        if unused or not all(torch.isfinite(parameter.grad).all() for parameter in model.parameters()):
            raise AssertionError(f"parameters without a finite gradient: {unused}")

    return ours, theirs, check


def gpst_parse(overrides: dict) -> tuple[Step, Step, Step]:
    """Word-synchronous parsing of one sentence against GPT-2's beam search for equally many tokens.

    Args:
        overrides: fields of the configuration that differ from the small preset.

    Returns:
        The measured step, the baseline's step and the check.
    """
    torch.manual_seed(0)
    config = GPSTConfig(**overrides)
    model, baseline = GPSTForCausalLM(config).eval(), _gpt2(config).eval()
    ids = torch.randint(FIRST_WORD, config.vocab_size, (1, PARSE_TOKENS))
    prompt = torch.full((1, 1), 1)

    def ours() -> object:
        return model.parse(ids, num_beams=BEAM)

    def theirs() -> object:
        return baseline.generate(
            prompt, num_beams=BEAM, max_new_tokens=PARSE_TOKENS, min_new_tokens=PARSE_TOKENS, do_sample=False
        )

    def check() -> None:
        output = ours()
        with torch.no_grad():  # the score of the found derivation, computed without search and caches
            rescored = model(ids, spans=[output.spans[0][0]]).joint_log_prob
        torch.testing.assert_close(output.log_probs[:, 0], rescored, rtol=1e-5, atol=1e-3)
        if theirs().shape[1] != PARSE_TOKENS + 1:
            raise AssertionError("the baseline did not generate as many tokens as the parser reads")

    return ours, theirs, check


CASES = {
    case.name: case
    for case in (
        Case(
            "gpst-train-quarter",
            "GPST forward + backward, D 192, d 64, 3 + 9 layers, V 12566, 2 x 512 tokens",
            "GPT2LMHeadModel forward + backward, same sizes and tokens",
            lambda: gpst_train(QUARTER, 2, 512),
        ),
        Case(
            "gpst-train-small",
            "GPST forward + backward, small preset, 1 x 512 tokens",
            "GPT2LMHeadModel forward + backward, same sizes and tokens",
            lambda: gpst_train({}, 1, 512),
        ),
        Case(
            "gpst-parse-quarter",
            f"GPST parse of {PARSE_TOKENS} tokens, beam {BEAM}, D 192, d 64, 3 + 9 layers, V 12566",
            f"GPT2LMHeadModel.generate(num_beams={BEAM}) of {PARSE_TOKENS} tokens, same sizes",
            lambda: gpst_parse(QUARTER),
        ),
        Case(
            "gpst-parse-small",
            f"GPST parse of {PARSE_TOKENS} tokens, beam {BEAM}, small preset",
            f"GPT2LMHeadModel.generate(num_beams={BEAM}) of {PARSE_TOKENS} tokens, same sizes",
            lambda: gpst_parse({}),
        ),
    )
}


def _seconds(step: Step) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def _memory_mib(field: str) -> float:
    """A field of this process's memory status: VmRSS (now) or VmHWM (highest so far)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise OSError(f"/proc/self/status has no field {field}; memory is measured on Linux only")


def _peak_memory(name: str, side: int, threads: int, results: multiprocessing.Queue) -> None:
    torch.set_num_threads(threads)
    step = CASES[name].build()[side]
    before = _memory_mib("VmRSS")
    step()
    results.put(_memory_mib("VmHWM") - before)


def peak_memory(name: str, side: int = 0) -> float:
    """Growth of the resident set during one step, in a fresh process.

    Args:
        name: case.
        side: 0 measured side, 1 baseline.

    Returns:
        MiB.

    Raises:
        RuntimeError: when that process fails.
    """
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_peak_memory, args=(name, side, torch.get_num_threads(), results))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"the process that measures the memory of {name} ended with status {process.exitcode}")
    return results.get()


def run_case(name: str, runs: int) -> dict:
    """Check and time one case.

    Args:
        name: key of `CASES`.
        runs: counted pairs, after one uncounted pair.

    Returns:
        The figures that `--json` prints.

    Raises:
        AssertionError: when the correctness check fails; nothing is reported then.
    """
    case = CASES[name]
    ours, theirs, check = case.build()
    check()
    _seconds(ours), _seconds(theirs)
    pairs = [(_seconds(ours), _seconds(theirs)) for _ in range(runs)]
    ratios = [mine / other for mine, other in pairs]
    return {
        "case": name,
        "baseline": case.baseline,
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        "runs": runs,
        "peak_memory_mib": round(peak_memory(name)),
        "baseline_peak_memory_mib": round(peak_memory(name, 1)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the cases that the command line names.

    Args:
        arguments: command line; default `sys.argv`.

    Returns:
        Exit status: 1 when a correctness check failed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="list the cases and stop")
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="case to run (repeat); default all")
    parser.add_argument("--runs", type=int, default=5, help="counted pairs per case")
    parser.add_argument("--threads", type=int, help="threads of torch; default as torch chooses")
    parser.add_argument("--json", action="store_true", help="print one JSON object per case")
    options = parser.parse_args(arguments)
    if options.runs < 1:
        parser.error(f"--runs {options.runs}: at least one pair is needed")
    if options.threads:
        torch.set_num_threads(options.threads)
    failed = False
    for name in options.case or CASES:
        if options.list:
            print(f"{name}: {CASES[name].what}; baseline: {CASES[name].baseline}")
            continue
        try:
            result = run_case(name, options.runs)
        except AssertionError as error:
            failed = True
            print(f"{name}: not reported, the correctness check failed: {error}", file=sys.stderr)
            continue
        if options.json:
            print(json.dumps(result), flush=True)
        else:
            print(
                f"{name}: ratio {result['ratio']} ({result['ratio_min']} to {result['ratio_max']}, {result['runs']} "
                f"pairs), peak memory {result['peak_memory_mib']} MiB (baseline "
                f"{result['baseline_peak_memory_mib']} MiB); baseline: {result['baseline']}",
                flush=True,
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
