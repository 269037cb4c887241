# SPDX-License-Identifier: Apache-2.0
"""Speed of the models as ratios to a baseline that runs in turn with them: the tables of docs/speed.md.

    python training/benchmark.py --case 'gpst-*' --runs 7
    python training/benchmark.py --help     # names all cases

Results are lines of JSON. Both sides of a case have the same width, layers, vocabulary and tokens, and run alternately:
A B A B. The ratio is the median of the pairs, so it depends little on changes of the machine's speed. Times are
wall-clock. On a CPU (Linux only), peak memory is the growth of the resident set of a fresh process that runs one step.
What a model computes is not checked here, but by the tests.
"""

import argparse
import fnmatch
import functools
import json
import multiprocessing
import re
import statistics
import subprocess
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.benchmark.utils.timer import timer
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from transformers.modeling_outputs import CausalLMOutput

import hf_synlm
from hf_synlm.data import gold_trees, samples, treebank, vocabulary
from hf_synlm.evaluation.results import describe_hardware, library_versions
from hf_synlm.hub.abilities import tree_codec
from hf_synlm.models.tree_lm.linearization import linearize
from hf_synlm.training.tasks import inference_network, tree_batches, variational
from hf_synlm.trees.codecs import LabeledCodec

Step = Callable[[], Any]
Sides = tuple[Step, Step]  # one step of what is measured, and of its baseline
QUARTER = {
    "vocab_size": 12566, "hidden_size": 192, "num_attention_heads": 4, "composition_size": 64, "score_size": 32,
    "composition_num_heads": 4, "composition_intermediate_size": 256, "parser_size": 32, "parser_score_size": 128,
    "parser_num_heads": 4, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 2, "reduce_token_id": 3,
    "cls_token_id": 4, "sep_token_id": 5,
}  # fmt: skip
RNNG_SIZES = {"vocab_size": 5400, "embedding_size": 256, "hidden_size": 256, "num_layers": 2, "dropout": 0.0}
TREE_SIZES = {"vocab_size": 5400, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "dropout": 0.0}
TREE_SIZES |= {"intermediate_size": 1024}
DEVICE = torch.device("cpu")


def place(thing: Any) -> Any:
    """Move a tensor, a module in place, or the tensors of a dictionary to the device in use."""
    return {name: place(value) for name, value in thing.items()} if isinstance(thing, dict) else thing.to(DEVICE)


def random_ids(rows: int, columns: int, vocab_size: int) -> Tensor:
    """Ids of words [rows, columns], the same at every call; ids below 10 may be special tokens."""
    return place(torch.randint(10, vocab_size, (rows, columns), generator=torch.Generator().manual_seed(1)))


def training_step(model: Any, loss_of: Step | None = None, **inputs: Any) -> Step:
    """Forward and backward pass of a model with random weights; `loss_of` gives the loss if the model does not."""
    place(model.train())
    loss = loss_of or (lambda: model(**inputs).loss)

    def step() -> None:
        model.zero_grad()
        loss().backward()

    return step


# ------------------------------------------------------------------------------------------ GPST and recurrent models
def gpt2(like: Any, **fields: Any) -> nn.Module:
    """GPT-2 of transformers with the tokens, width, heads and layers of a configuration, without dropout."""
    sizes = {"vocab_size": like.vocab_size, "n_embd": like.hidden_size, "n_layer": like.num_hidden_layers}
    sizes |= {"n_head": like.num_attention_heads, "eos_token_id": None, "pad_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes | fields, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def without_dropout(config_class: Any, preset: str | None = None, **fields: Any) -> Any:
    """A configuration, of a preset, whose dropout is off."""
    make = partial(config_class.from_preset, preset) if preset else config_class
    return make(**fields, **{name: 0.0 for name in vars(make(**fields)) if name.endswith("dropout")})


def gpst_train(sizes: dict, rows: int, columns: int) -> Sides:
    """The whole objective, on contexts of sentences of 8 to 44 random tokens, against GPT-2's loss."""
    config = without_dropout(hf_synlm.GPSTConfig, **sizes, merge_noise=0.0)
    ids = random_ids(rows, columns, config.vocab_size)
    ends = torch.randint(8, 45, (rows, columns), generator=torch.Generator().manual_seed(1)).cumsum(1)
    sentence_ids = place(1 + (ends[:, None] <= torch.arange(columns)[:, None]).sum(-1))
    ours = training_step(hf_synlm.GPSTForCausalLM(config), input_ids=ids, labels=ids, sentence_ids=sentence_ids)
    return ours, training_step(gpt2(config), input_ids=ids, labels=ids)


def gpst_parse(sizes: dict) -> Sides:
    """Search in a sentence of 30 tokens with 20 beams against GPT-2's, which generates as many."""
    config = hf_synlm.GPSTConfig(**sizes)
    model, baseline = place(hf_synlm.GPSTForCausalLM(config).eval()), place(gpt2(config).eval())
    ids, prompt = random_ids(1, 30, config.vocab_size), place(torch.ones(1, 1, dtype=torch.long))
    generate = partial(baseline.generate, max_new_tokens=30, min_new_tokens=30, do_sample=False, num_beams=20)
    return lambda: model.parse(ids, num_beams=20), lambda: generate(prompt)


class LSTMs(nn.Module):
    """Embedding, one `nn.LSTM` per layer, and the embedding again as output layer: all from PyTorch."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        widths = getattr(config, "layer_sizes", None) or [config.layer_size] * config.num_layers
        sizes = [config.embedding_size, *widths]
        self.embedding = nn.Embedding(config.vocab_size, sizes[0])
        self.layers = nn.ModuleList(nn.LSTM(*pair, batch_first=True) for pair in zip(sizes, widths, strict=False))
        self.projection = nn.Linear(sizes[-1], sizes[0]) if sizes[-1] != sizes[0] else nn.Identity()

    def forward(self, input_ids: Tensor, labels: Tensor) -> CausalLMOutput:
        """Mean cross entropy of the next tokens."""
        hidden = self.embedding(input_ids[:, :-1])
        for layer in self.layers:
            hidden, _ = layer(hidden)
        logits = F.linear(self.projection(hidden), self.embedding.weight)
        return CausalLMOutput(F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()))


def recurrent_train(name: str, preset: str, rows: int, columns: int, **baseline: bool) -> Sides:
    """A model of the Penn Treebank's size against LSTMs as wide and deep, or against itself with other fields."""
    config_class, model_class = (getattr(hf_synlm, name + end) for end in ("Config", "ForCausalLM"))
    config = config_class.from_preset(preset) if baseline else without_dropout(config_class, preset)
    other = model_class(config_class.from_preset(preset, **baseline)) if baseline else LSTMs(config)
    ids = random_ids(rows, columns, config.vocab_size)
    return tuple(training_step(model, input_ids=ids, labels=ids) for model in (model_class(config), other))


# ------------------------------------------------------------------------------------------ models of given trees
@functools.cache
def embedded_trees() -> tuple[LabeledCodec, list[dict]]:
    """Codec and encoded trees of the embedded treebank, so that depth, width and length are real."""
    sentences = list(treebank.read_treebank(samples.sample_path("trees.train.txt")))
    labels = gold_trees.label_inventory(sentences)
    tokenizer = vocabulary.word_tokenizer([sentence.words for sentence in sentences], unknown="berkeley")
    codec = LabeledCodec("top_down", labels)
    return codec, gold_trees.encode_trees(sentences, tokenizer, codec)


def some_trees(number: int) -> list[dict]:
    """The first encoded trees of 16 to 22 words."""
    return [tree for tree in embedded_trees()[1] if 16 <= len(tree["input_ids"]) <= 22][:number]


def rnng_train(sentences: int) -> Sides:
    """Training on given trees against an LSTM over as many steps as there are pushes; every top-down action is one.

    The plan of the derivations is made before, as workers of the loader do. The LSTM has no embedding, no output layer
    and no composition.
    """
    rows = some_trees(sentences)
    codec = embedded_trees()[0]
    config = hf_synlm.RNNGConfig(nonterminals=codec.labels, **RNNG_SIZES)
    batch = tree_batches.TreeCollator(0, codec, codec, config)(rows)
    del batch["num_words"]
    lstm = nn.LSTM(256, 256, 2, batch_first=True)
    inputs = place(torch.randn(sentences, -(-sum(len(row["actions"]) for row in rows) // sentences), 256))
    ours = training_step(hf_synlm.RNNGForCausalLM(config), **place(batch))
    return ours, training_step(lstm, lambda: lstm(inputs)[0].sum())


def pushdown_train(layers: int = 4) -> Sides:
    """Pushdown Layers with gold attachments against GPT-2 on the same tokens."""
    config = hf_synlm.PushdownConfig(**TREE_SIZES)
    batch = tree_batches.TreeCollator(0, tree_codec(config), embedded_trees()[0])(some_trees(32))
    del batch["num_words"]
    ids = place(F.pad(batch["input_ids"], (1, 0), value=config.bos_token_id))
    ours = training_step(hf_synlm.PushdownForCausalLM(config), **place(batch))
    return ours, training_step(gpt2(config, n_layer=layers), input_ids=ids, labels=ids)


def transformer_grammar_train() -> Sides:
    """Transformer Grammar against GPT-2 on as many tokens: words, labels, and the second copies of closing labels."""
    labels, batch = embedded_trees()[0].labels, embedded_trees()[0].pad(some_trees(32))
    config = hf_synlm.TreeLMConfig(nonterminals=labels, structure_attention="stack_compose", **TREE_SIZES)
    ids = place(linearize(batch["actions"], batch["input_ids"], config).tokens)
    ours = training_step(hf_synlm.TreeLMForCausalLM(config), **place(batch))
    return ours, training_step(gpt2(config, vocab_size=5400 + 2 * len(labels)), input_ids=ids, labels=ids)


@functools.cache
def searched_model(steps: int = 40) -> tuple[Any, list[Tensor]]:
    """A briefly trained RNNG, for the work depends on how sure a model is, and unseen sentences of 17 tokens."""
    codec, trees = embedded_trees()
    model = hf_synlm.RNNGForCausalLM(hf_synlm.RNNGConfig(nonterminals=codec.labels, **RNNG_SIZES))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for start in range(0, 32 * steps, 32):
        training_step(model, **place(codec.pad(trees[start : start + 32])))()
        optimizer.step()
    unseen = (tree["input_ids"] for tree in trees[32 * steps :])
    return place(model.eval()), [place(torch.tensor(ids)) for ids in unseen if len(ids) == 17]


def rnng_search(sentences: int, beam: int, base_beam: int, length: int = 17) -> Sides:
    """Search of sentences together against as many of 17 tokens, one by one, with another beam."""
    model, data = searched_model()
    ids = torch.cat(data[: sentences * -(-length // 17)]).view(sentences, -1)[:, :length]
    parse = partial(model.parse, num_beams=10, fast_track_size=1)
    alone = [row[None] for row in data[:sentences]]
    return lambda: parse(ids, action_beam_size=beam), lambda: [parse(row, action_beam_size=base_beam) for row in alone]


# ------------------------------------------------------------------------------------------ growth
def gpst_growth(length: int, beam: int) -> Sides:
    """A parse of text by `gpst-tiny` against one of 17 tokens with 20 beams."""
    folder = Path(__file__).parents[1] / "model_cards" / "gpst-tiny"
    model = place(hf_synlm.GPSTForCausalLM.from_pretrained(folder).eval())
    text = samples.sample_path("raw.test.txt").read_text().replace("\n", " ")[: 10 * length]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = place(tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids)
    return lambda: model.parse(ids[:, :length], num_beams=beam), lambda: model.parse(ids[:, :17], num_beams=20)


def pcfg_call(call: str, length: int, grammar: str, symbols: int, rank: int | None = None) -> Step:
    """A training step, the loss or the logits of 8 sentences."""
    sizes = {"num_nonterminals": symbols, "num_preterminals": 2 * symbols, "rank": rank}
    model = hf_synlm.PCFGForCausalLM(hf_synlm.PCFGConfig(vocab_size=10_000, grammar=grammar, **sizes))
    ids = random_ids(8, length, 10_000)
    inputs = {"input_ids": ids} if call == "logits" else {"input_ids": ids, "labels": ids}
    place(model.train(call != "logits"))
    return training_step(model, **inputs) if call == "step" else torch.no_grad()(partial(model, **inputs))


def pcfg_growth(*case: Any) -> Sides:
    """A call of a grammar against a step of the dense one on 20 words."""
    return pcfg_call(*case), pcfg_call("step", 20, "dense", 30)


def length_train(name: str, length: int, tokens: int = 1024) -> Sides:
    """A step on sentences of one length against GPST's: table 5 of the GPST paper (Hu et al., ACL 2024)."""
    model, baseline, ids = EIGHT_MILLION[name](), EIGHT_MILLION["gpst"](), random_ids(tokens // length, length, 10_000)
    sides = training_step(model, input_ids=ids, labels=ids), training_step(baseline, input_ids=ids, labels=ids)
    if name != "urnng":
        return sides
    variational.attach_network(model, inference_network.InferenceNetwork(360, 141, 1 << 10, 0.5))
    ended = F.pad(ids, (0, 1), value=model.config.eos_token_id)
    batch = {"input_ids": ended, "attention_mask": torch.ones_like(ended)}
    return training_step(model, lambda: variational.variational_loss(model, model, batch, 8, 1.0, True)[0]), sides[1]


def eight_million(config_class: Any, **sizes: Any) -> Callable[[], Any]:
    """What makes a model of about so many parameters."""
    return lambda: AutoModelForCausalLM.from_config(without_dropout(config_class, **sizes | {"vocab_size": 10_000}))


EIGHT_MILLION: dict[str, Callable[[], Any]] = {
    "gpst": eight_million(hf_synlm.GPSTConfig, **QUARTER),
    "gpt2": lambda: gpt2(hf_synlm.GPSTConfig(**QUARTER), n_embd=200, vocab_size=10_000),
    "awd-lstm": eight_million(hf_synlm.PaLMConfig, preset="awd-lstm-ptb", embedding_size=216, layer_size=621),
    "ordered-memory": eight_million(hf_synlm.OrderedMemoryConfig, hidden_size=390),
    "urnng": eight_million(hf_synlm.URNNGConfig, hidden_size=360),
}
PCFGS = (("dense", 30), ("tensor", 60, 100), ("simple", 128))  # symbols, rank
PARTS_OF_PCFGS = [*(("step", n) for n in (5, 10, 20, 40, 80)), ("loss", 20), ("logits", 20)]
PCFG_SIZES = [("dense", 15), ("dense", 60), *(("tensor", 60, rank) for rank in (25, 50, 200, 400))]
CASES: dict[str, Callable[[], Sides]] = {
    "gpst-train-quarter": partial(gpst_train, QUARTER, 2, 512),
    "gpst-train-small": partial(gpst_train, {}, 1, 512),
    "gpst-parse-quarter": partial(gpst_parse, QUARTER),
    "gpst-parse-small": partial(gpst_parse, {}),
    **{f"rnng-train-b{n}": partial(rnng_train, n) for n in (32, 128)},
    "rnng-search-k100": partial(rnng_search, 1, 100, 10),
    "rnng-search-batched": partial(rnng_search, 8, 100, 100),
    "on-lstm-train": partial(recurrent_train, "ONLSTM", "on-lstm-ptb", 20, 70),
    "prpn-train": partial(recurrent_train, "PRPN", "prpn-ptb-word", 64, 35),
    "palm-train": partial(recurrent_train, "PaLM", "palm-ptb", 20, 70, span_attention=False),  # which is AWD-LSTM
    "pushdown-train": pushdown_train,
    "pushdown-train-parameters": partial(pushdown_train, layers=7),
    "transformer-grammar-train": transformer_grammar_train,
}
GPU_CASES = {"gpst-train-8x1024": partial(gpst_train, {}, 8, 1024), "rnng-train-b512": partial(rnng_train, 512)}
GROWTH: dict[str, Callable[[], Sides]] = {
    **{f"growth-rnng-beam-{k}": partial(rnng_search, 1, k, 10) for k in (20, 50, 100, 200, 400)},
    **{f"growth-rnng-tokens-{n}": partial(rnng_search, 1, 100, 10, n) for n in (8, 34, 68)},
    **{f"growth-rnng-together-{n}": partial(rnng_search, n, 100, 10) for n in (2, 4, 8, 16)},
    **{f"growth-gpst-{n}-beam-{k}": partial(gpst_growth, n, k) for n in (17, 60) for k in (20, 50, 100, 300, 1000)},
    **{"growth-pcfg-" + "-".join(map(str, (*grammar, *part))): partial(pcfg_growth, *part, *grammar)
       for grammar in PCFGS for part in PARTS_OF_PCFGS},
    **{"growth-pcfg-" + "-".join(map(str, size)): partial(pcfg_growth, "step", 20, *size) for size in PCFG_SIZES},
    **{f"length-{name}-{n}": partial(length_train, name, n) for name in EIGHT_MILLION
       for n in (128, 256, 512, 1024) if name != "urnng" or n <= 256},  # the tables of URNNG grow too large beyond
}  # fmt: skip
TABLE = CASES | GPU_CASES | GROWTH


# ------------------------------------------------------------------------------------------ measuring
def milliseconds(step: Step) -> float:
    """Wall-clock time of one call, until the device is done."""
    begin, _, end = timer(), step(), timer()
    return round(1e3 * (end - begin), 3)


def grown_mib(case: str, side: int) -> int:
    """How much the resident set of this process grows while it runs one step (Linux)."""
    status, step = Path("/proc/self/status"), TABLE[case]()[side]
    before = status.read_text()
    step()
    now, then = re.findall(r"VmHWM:\s+(\d+)", status.read_text()), re.findall(r"VmRSS:\s+(\d+)", before)
    return (int(now[0]) - int(then[0])) >> 10


def resources(case: str, side: int, step: Step) -> dict[str, Any]:
    """Peak of the memory of one step in MiB; on a GPU also its kernels and the milliseconds that they run."""
    if DEVICE.type != "cuda":
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            return {"peak_mib": fresh.submit(grown_mib, case, side).result()}
    torch.cuda.reset_peak_memory_stats()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        milliseconds(step)
    times = [event.device_time for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return {"peak_mib": torch.cuda.max_memory_allocated() >> 20, "kernels": len(times), "busy_ms": sum(times) / 1e3}


def run_case(case: str, runs: int) -> dict[str, Any]:
    """Time one case, after two steps of warming up: the ratio of the sides, and what each costs."""
    sides = TABLE[case]()
    times = [[milliseconds(step) for step in sides] for _ in range(runs + 2)][2:]
    ratios = sorted(round(ours / theirs, 3) for ours, theirs in times)
    medians = enumerate(statistics.median(found) for found in zip(*times, strict=True))
    costs = [{"ms": ms} | resources(case, side, sides[side]) for side, ms in medians]
    return {"ratio": statistics.median(ratios), "ratio_min": ratios[0], "ratio_max": ratios[-1], "costs": costs}


def origin() -> dict[str, Any]:
    """Where a result comes from: machine, versions, and commit of the code."""
    command = ["git", "-C", str(Path(hf_synlm.__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    return {**describe_hardware(DEVICE), **library_versions(), "commit": commit}


def main(arguments: list[str] | None = None) -> None:
    """Run the cases that the command line names."""
    global DEVICE
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.epilog = "cases:\n  " + "\n  ".join(TABLE)
    parser.add_argument("--case", action="append", help="case or pattern to run (repeat); default: all but growth")
    parser.add_argument("--runs", type=int, default=5, help="counted pairs per case")
    parser.add_argument("--device", type=torch.device, default=DEVICE, help="where both sides run: cpu, cuda")
    parser.add_argument("--precision", default="float32", choices=("float32", "tf32", "bf16"), help="of both sides")
    options = parser.parse_args(arguments)
    DEVICE, precision = options.device, options.precision
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "float32"
    patterns = options.case or [*CASES, *(GPU_CASES if DEVICE.type == "cuda" else ())]
    for case in (name for name in TABLE if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)):
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=precision == "bf16"):
            row = run_case(case, options.runs)
        print(json.dumps({"case": case, "precision": precision, "runs": options.runs, **row, **origin()}), flush=True)


if __name__ == "__main__":
    main()
