"""Kernel launches and waits of one step of every model on the pretend GPU.

    python -m tests.helpers.launches [CASE ...]

Numbers of sentences, tokens and layers are those of real training; the widths are small, for they change no count. A
launch costs a host about 5 us, whatever the kernel does. Attention counts as the products and the softmax that it is
made of, which a GPU runs as one kernel. The ceilings are a little above what was reached, for the tests also fill fresh
memory. Lower them when a change needs less.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import hf_synlm
from hf_synlm.data.gold_trees import encode_trees, label_inventory
from hf_synlm.data.samples import sample_path
from hf_synlm.data.treebank import read_treebank
from hf_synlm.data.vocabulary import word_tokenizer
from hf_synlm.trees.codecs import LabeledCodec
from tests.helpers.pretend_gpu import PretendGPU

Inputs = dict[str, torch.Tensor]


class Case(NamedTuple):
    """A model with its inputs, what is called, and the most kernels and waits that it may have."""

    build: Callable[[], tuple[Any, Inputs]]
    call: str  # "train", or a method
    kernels: int
    waits: int
    options: dict[str, int] = {}
    bf16: bool = False


def _small(prefix: str, preset: str | None, widths: str, **fields: Any) -> Any:
    """A model of real depth whose widths are 8."""
    config_class = getattr(hf_synlm, f"{prefix}Config")
    fields = {"vocab_size": 40, **dict.fromkeys(widths.split(), 8), **fields}
    config = config_class.from_preset(preset, **fields) if preset else config_class(**fields)
    return getattr(hf_synlm, f"{prefix}ForCausalLM")(config)


def _gpst(rows: int, columns: int, sentence: int) -> tuple[Any, Inputs]:
    widths = "hidden_size composition_size composition_intermediate_size parser_size parser_score_size"
    heads = dict.fromkeys(("num_attention_heads", "composition_num_heads", "parser_num_heads"), 2)
    special = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 2, "reduce_token_id": 3}
    special |= {"cls_token_id": 4, "sep_token_id": 5}
    ids = torch.randint(6, 40, (rows, columns))
    inputs = {"input_ids": ids, "sentence_ids": (torch.arange(columns) // sentence + 1).expand_as(ids)}
    if rows == 1:
        del inputs["sentence_ids"]
    return _small("GPST", None, widths, score_size=4, max_position_embeddings=1024, **heads, **special), inputs


def rnng(num_sentences: int, lengths: range, **sizes: int) -> tuple[Any, Inputs]:
    """RNNG of width 8, or `sizes`, with trees of sentences of so many words."""
    sentences = list(read_treebank(sample_path("trees.train.txt")))
    labels = label_inventory(sentences)
    tokenizer = word_tokenizer([sentence.words for sentence in sentences], unknown="berkeley")
    codec = LabeledCodec("top_down", labels)
    trees = encode_trees(sentences, tokenizer, codec)
    chosen = [tree for x, tree in zip(sentences, trees, strict=True) if len(x.words) in lengths][:num_sentences]
    model, inputs = _small("RNNG", None, "embedding_size hidden_size", vocab_size=len(tokenizer), num_layers=2,
                           nonterminals=labels, **sizes), codec.pad(chosen)  # fmt: skip
    return model, inputs if num_sentences > 1 else {"input_ids": inputs["input_ids"]}


def _tree_lm() -> tuple[Any, Inputs]:
    sizes = {"num_attention_heads": 2, "num_hidden_layers": 4, "nonterminals": ["NP", "S", "VP"]}
    model = _small("TreeLM", None, "hidden_size intermediate_size", **sizes)
    return model, {"input_ids": torch.randint(4, 40, (1, 12))}


def _recurrent(rows: int, columns: int, *model: str, **fields: Any) -> tuple[Any, Inputs]:
    ids = torch.randint(4, 40, (rows, columns))
    return _small(*model, **fields), {"input_ids": ids, "labels": ids}


_ON_LSTM = ("ONLSTM", "on-lstm-ptb", "embedding_size layer_size")
_PRPN = ("PRPN", "prpn-ptb-word", "embedding_size layer_size")
_PCFG = ("PCFG", "neural-pcfg", "symbol_size num_nonterminals num_preterminals")
_PALM = ("PaLM", "palm-ptb", "embedding_size layer_size rrnn_size attention_size")
_BEAMS = {"num_beams": 10, "action_beam_size": 100, "fast_track_size": 1}
CASES = {
    "gpst-train 2 x 512": Case(lambda: _gpst(2, 512, 26), "train", 10_110, 5),
    "gpst-train 8 x 1024": Case(lambda: _gpst(8, 1024, 26), "train", 10_260, 5),
    "gpst-train 8 x 1024, bf16": Case(lambda: _gpst(8, 1024, 26), "train", 11_700, 5, bf16=True),
    "gpst-parse 24 tokens, beam 20": Case(lambda: _gpst(1, 24, 24), "parse", 29_100, 40, {"num_beams": 20}),
    "rnng-train 32 sentences": Case(lambda: rnng(32, range(16, 23)), "train", 3_800, 9),
    "rnng-parse 17 words, action beam 100": Case(lambda: rnng(1, range(17, 18)), "parse", 27_500, 216, _BEAMS),
    "tree-lm-parse 12 words, action beam 20": Case(
        _tree_lm, "parse", 36_200, 152, {"num_beams": 10, "action_beam_size": 20}
    ),
    "pcfg-train 4 x 25": Case(lambda: _recurrent(4, 25, *_PCFG), "train", 2_700, 10),
    "on-lstm-train 20 x 70": Case(lambda: _recurrent(20, 70, *_ON_LSTM, chunk_size=2), "train", 2_400, 0),
    "prpn-train 64 x 35": Case(lambda: _recurrent(64, 35, *_PRPN), "train", 3_700, 0),
    "palm-train 20 x 70": Case(lambda: _recurrent(20, 70, *_PALM), "train", 320, 0),
}


def count(gpu: PretendGPU, case: Case) -> tuple[int, int]:
    """Kernels and waits (with copies that block) of one call."""
    torch.manual_seed(0)
    model, inputs = case.build()
    if case.call == "train" and "actions" not in inputs:
        inputs.setdefault("labels", inputs["input_ids"])
    model, inputs = gpu.move(model), {name: gpu.move(value) for name, value in inputs.items()}
    gpu.reset()
    if case.call == "train":
        with torch.autocast("pretend", dtype=torch.bfloat16, enabled=case.bf16):
            loss = model.train()(**inputs).loss
        loss.backward()
    else:
        getattr(model.eval(), case.call)(**inputs, **case.options)
    return sum(gpu.kernels.values()), sum(gpu.waits.values()) + sum(gpu.copies.values())


if __name__ == "__main__":
    gpu = PretendGPU()
    with gpu:
        for name in sys.argv[1:] or CASES:
            kernels, waits = count(gpu, CASES[name])
            print(f"{name}: {kernels} kernels, {waits} waits", *gpu.waits.most_common(5), sep="\n    ", flush=True)
