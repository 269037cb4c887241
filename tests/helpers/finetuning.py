"""Tiny models, files of examples, and command lines of the fine-tuning programs."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import BartConfig, BartForConditionalGeneration, GPT2Config, GPT2LMHeadModel, TrainingArguments

from hf_synlm import ONLSTMConfig, ONLSTMForCausalLM, RNNGConfig, RNNGForCausalLM
from hf_synlm.data.samples import sample_path
from hf_synlm.data.tokenizers import train_bpe_tokenizer
from hf_synlm.data.vocabulary import word_tokenizer
from tests.helpers.scoring_models import small_gpst

SENTENCES = sample_path("raw.train.txt").read_text(encoding="utf-8").splitlines()[:300]
SENTENCES = [line.strip() for line in SENTENCES if line.strip()]


def tiny_gpt2(layers: int, vocab_size: int) -> GPT2LMHeadModel:
    """Without dropout; the first token begins and ends texts."""
    sizes = {"n_embd": 16, "n_layer": layers, "n_head": 2, "vocab_size": vocab_size, "n_positions": 64}
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0))


def trainer_arguments(folder: Path, **options: Any) -> TrainingArguments:
    """One step of `Trainer` unless the options tell otherwise."""
    settings = {"max_steps": 1, "learning_rate": 1e-2, "report_to": [], "use_cpu": True, "save_strategy": "no"}
    return TrainingArguments(str(folder), logging_steps=1, disable_tqdm=True, **(settings | options))


def write_models(folder: Path) -> Path:
    """Folders of tiny models with their tokenizers: gpst, gpt2, on_lstm, rnng, bart."""
    torch.manual_seed(0)
    pieces = train_bpe_tokenizer(SENTENCES, 400)
    words = word_tokenizer([line.split() for line in SENTENCES], vocab_size=300, lowercase=True, end_token=True)
    begin = {name: getattr(pieces, name) for name in ("bos_token_id", "eos_token_id", "vocab_size")}
    layers = {f"{side}_{what}": 1 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    layers.update(d_model=8, encoder_ffn_dim=8, decoder_ffn_dim=8, max_position_embeddings=64)
    rnng = {"embedding_size": 8, "hidden_size": 20, "nonterminals": ["NP", "S"]}
    rnng |= {"scoring_num_beams": 1, "action_beam_size": 4}
    made = {
        "gpst": (small_gpst(pieces), pieces),
        "gpt2": (GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=64, **begin)), pieces),
        "bart": (BartForConditionalGeneration(BartConfig(vocab_size=len(pieces), **layers)), pieces),
        "on_lstm": (ONLSTMForCausalLM(ONLSTMConfig.from_tokenizer(words, embedding_size=20, hidden_size=20)), words),
        "rnng": (RNNGForCausalLM(RNNGConfig.from_tokenizer(words, **rnng)), words),
    }
    for name, (model, tokenizer) in made.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def write_files(folder: Path) -> dict[str, str]:
    """Small files of every kind of task."""
    text = [" ".join(line.split()[:9]) for line in SENTENCES]
    pairs = [{"sentence1": text[k], "sentence2": text[k + 1], "label": k % 2, "idx": k} for k in range(14)]
    similar = [{"sentence1": text[k][:18], "sentence2": text[k + 1][:12], "label": 0.5 * (k % 7)} for k in range(14)]
    single = [{"sentence": row["sentence1"], "label": row["label"]} for row in pairs]
    named = [{"review": row["sentence1"], "label": ("bad", "good", "odd")[k % 3]} for k, row in enumerate(pairs)]
    three = [{"premise": r["sentence1"], "hypothesis": r["sentence2"], "label": k % 3} for k, r in enumerate(pairs)]
    documents = [
        {"document": " ".join(text[k : k + 3]), "summary": text[k], "other": k, "references": [text[k], text[k + 1]]}
        for k in range(14)
    ]
    kinds = {"rte": pairs, "stsb": similar, "cola": single, "named": named, "mnli": three, "documents": documents}
    made = {name: write_rows(folder / f"{name}.jsonl", rows) for name, rows in kinds.items()}
    for name, count in (("train", 24), ("valid", 6), ("test", 6)):
        lines = sample_path(f"trees.{name}.txt").read_text(encoding="utf-8").splitlines()[:count]
        made[name] = str(folder / f"{name}.trees")
        Path(made[name]).write_text("\n".join(lines), encoding="utf-8")
    return made


def command(script: str, model: Path | str, files: dict[str, str], output_dir: Path, *flags: str) -> list[str]:
    """Command line of a program that takes two steps."""
    data = {
        "glue": ["--task-name", "rte", "--train-file", files["rte"], "--validation-file", files["rte"],
                 "--max-length", "32"],
        "summarization": ["--train-file", files["documents"], "--validation-file", files["documents"],
                          "--max-source-length", "24", "--max-target-length", "8", "--max-predict-samples", "3"],
        "induction": ["--train-trees", files["train"], "--validation-trees", files["valid"], "--test-trees",
                      files["test"], "--search-num-beams", "2"],
    }[script]  # fmt: skip
    common = ["--per-device-train-batch-size", "2", "--logging-steps", "1", "--output-dir", str(output_dir)]
    return ["--model-name-or-path", str(model), *data, *common, "--max-train-steps", "2", *flags]
