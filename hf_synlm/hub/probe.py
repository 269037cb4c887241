"""What a model folder computes where hf_synlm is not installed: for `verify`, and for the report after a training.

`run_without_package` runs this file as a script in a process where `import hf_synlm` fails. So the file imports nothing
of this package; it does what a user of a published model does, with the Auto classes.
"""

import inspect
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

MODEL_CLASSES = ("AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification")
# Of the report after a training.
BATCH_SIZE, NEW_TOKENS = 32, 14


def run_without_package(
    task: str, folder: Path, request: dict[str, Any], timeout_seconds: float | None = None
) -> dict[str, Any]:
    """Run a task of this file in a clean process: `python -I`, an empty working folder, no network.

    The process has its own cache of remote code, cannot import hf_synlm, and unpickles nothing but plain data.

    Args:
        task: a name in `TASKS`.
        folder: the model.
        request: what the task needs, as tensors and plain data.
        timeout_seconds: limit for the process; None = no limit.

    Returns:
        The answer of the task.

    Raises:
        RuntimeError: the process fails or takes too long; the message shows the end of what it wrote.
    """
    with tempfile.TemporaryDirectory(prefix="hf_synlm_probe_") as temporary:
        place = Path(temporary)
        request_file, answer_file = place / "request.pt", place / "answer.pt"
        torch.save({**request, "num_threads": torch.get_num_threads()}, request_file)
        environment = {
            **os.environ,
            "HF_HOME": str(place / "home"),
            "HF_MODULES_CACHE": str(place / "modules"),
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        # The process does not belong to a distributed run that starts it.
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)
        # -I: neither the current folder nor PYTHONPATH nor the user's own packages are on the path.
        command = [sys.executable, "-I", __file__, task, str(folder.absolute()), str(request_file), str(answer_file)]
        try:
            run = subprocess.run(
                command,
                cwd=place,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout_seconds,
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"The process without hf_synlm took longer than {timeout_seconds} seconds.") from error
        if run.returncode or not answer_file.is_file():
            raise RuntimeError(f"The process without hf_synlm ended with {run.returncode}:\n{run.stderr[-4000:]}")
        return torch.load(answer_file, weights_only=True)


# --------------------------------------------------------------------------------------------------------- verify
def probe_folder(folder: str, request: dict[str, Any]) -> dict[str, Any]:
    """Compute one entry per check of `verify`, without load reports and progress bars.

    Args:
        folder: model folder with an `auto_map`.
        request: `auto_map`; `texts` for the tokenizer; `input_ids` and `attention_mask` [B, T] for the models;
            `num_beams` and `max_new_tokens` for parsing and generation; `seed` for weights that the folder lacks.

    Returns:
        By check, `{"values": {name: tensor, list or text}}` or `{"error": traceback}`.
    """
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        return _probe_all(folder, request)
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _probe_all(folder: str, request: dict[str, Any]) -> dict[str, Any]:
    results = {
        "AutoConfig": _attempt(_probe_config, folder),
        "AutoTokenizer": _attempt(_probe_tokenizer, folder, request),
    }
    for name in MODEL_CLASSES:
        if name in request["auto_map"]:
            results[name] = _attempt(_probe_model, folder, name, request)
    if "AutoModelForCausalLM" in request["auto_map"]:
        results["parse"] = _attempt(_probe_parse, folder, request)
        results["generate"] = _attempt(_probe_generate, folder, request)
    # A model without parser has nothing to compare there.
    return {name: result for name, result in results.items() if result != {"values": {}}}


def _attempt(probe: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    # A broken class is a finding about the folder; the other classes are still worth a look.
    try:
        with torch.no_grad():
            return {"values": probe(*arguments)}
    except Exception:
        return {"error": traceback.format_exc(limit=-3)}


def _load(folder: str, auto_class: str, request: dict[str, Any]) -> Any:
    """Load a model. Weights that the folder lacks, such as a new head, get the same values in every process."""
    loader = getattr(transformers, auto_class)
    model, info = loader.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    generator = torch.Generator().manual_seed(request["seed"])
    for name in sorted(info["missing_keys"]):
        tensor = model.get_parameter(name)
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return model.eval()


def _inputs(request: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": request["input_ids"], "attention_mask": request["attention_mask"]}


def _probe_config(folder: str) -> dict[str, Any]:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    return {"class": type(config).__module__, "config": config.to_json_string(use_diff=False)}


def _probe_tokenizer(folder: str, request: dict[str, Any]) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    ids = [tokenizer(text)["input_ids"] for text in request["texts"]]
    return {"input_ids": ids, "decoded": [tokenizer.decode(row) for row in ids]}


def _probe_model(folder: str, auto_class: str, request: dict[str, Any]) -> dict[str, Any]:
    model = _load(folder, auto_class, request)
    output = model(**_inputs(request), **_given_structure(folder, model, request))
    name = "last_hidden_state" if auto_class == "AutoModel" else "logits"
    values = output[name]
    if auto_class != "AutoModelForSequenceClassification":
        values = values[request["attention_mask"].bool()]  # values at padding have no meaning
    return {"class": type(model).__module__, name: values}


def _given_structure(folder: str, model: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Derivations for a model whose `forward` requires them; the language model of the folder finds them."""
    actions = inspect.signature(model.forward).parameters.get("actions")
    if actions is None or actions.default is not inspect.Parameter.empty:
        return {}
    return {"actions": _parse(_load(folder, "AutoModelForCausalLM", request), request).actions[:, 0]}


def _probe_parse(folder: str, request: dict[str, Any]) -> dict[str, Any]:
    model = _load(folder, "AutoModelForCausalLM", request)
    if not getattr(model.config, "gives_trees", hasattr(model, "parse")):
        return {}
    output = _parse(model, request)
    names = ("spans", "labels", "actions", "log_probs", "token_log_probs")
    return {name: output[name] for name in names if name in output}


def _parse(model: Any, request: dict[str, Any]) -> Any:
    # Models that parse without a search have no beam.
    beam = {"num_beams": request["num_beams"]} if "num_beams" in inspect.signature(model.parse).parameters else {}
    return model.parse(**_inputs(request), **beam)


def _probe_generate(folder: str, request: dict[str, Any]) -> dict[str, Any]:
    output = _load(folder, "AutoModelForCausalLM", request).generate(
        **_inputs(request),
        do_sample=False,
        num_beams=1,
        max_new_tokens=request["max_new_tokens"],
        return_dict_in_generate=True,
    )
    return {name: output[name] for name in ("sequences", "actions", "spans", "labels") if name in output}


# ------------------------------------------------------------------------------------------ report after a training
def parse_and_generate(folder: str, request: dict[str, Any]) -> dict[str, Any]:
    """Parse texts and generate one sentence with its tree.

    Args:
        folder: the model.
        request: `texts` by name of the data set; `word_ends`, for each text which tokens end a word; `methods`, by
            kind of tree the options of `parse`; `prompt` and `seed` for generation.

    Returns:
        `class`: name of the class that computed; `trees`: by data set and kind, spans over tokens of each text;
        `generated`: `text`, `tokens`, `spans` and `labels` of the sentence.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    trees = {
        name: {
            kind: _best_trees(model, tokenizer, texts, request["word_ends"][name], options)
            for kind, options in request["methods"].items()
        }
        for name, texts in request["texts"].items()
    }
    return {
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "trees": trees,
        "generated": _sample_sentence(model, tokenizer, request),
    }


def _best_trees(
    model: Any, tokenizer: Any, texts: list[str], ends: list[list[bool]], options: dict[str, Any]
) -> list[list[tuple[int, int]]]:
    """Spans over tokens of the best tree of each text; `ends` marks the last token of every word."""
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
    trees: list[list[tuple[int, int]]] = [[] for _ in ids]
    for start in range(0, len(order), BATCH_SIZE):
        rows = order[start : start + BATCH_SIZE]
        batch = tokenizer.pad({"input_ids": [ids[row] for row in rows]}, padding_side="right", return_tensors="pt")
        word_ends = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
        for line, row in enumerate(rows):
            if len(ids[row]) != len(ends[row]):
                raise ValueError(f"The saved tokenizer encodes {texts[row]!r} differently.")
            word_ends[line, : len(ids[row])] = torch.tensor(ends[row])
        output = model.parse(batch["input_ids"], attention_mask=batch["attention_mask"], word_ends=word_ends, **options)
        for row, hypotheses in zip(rows, output.spans, strict=True):
            trees[row] = hypotheses[0]
    return trees


def _sample_sentence(model: Any, tokenizer: Any, request: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(request["seed"])
    prompt = tokenizer([request["prompt"]], add_special_tokens=False, return_tensors="pt")
    output = model.generate(
        prompt["input_ids"],
        attention_mask=prompt["attention_mask"],
        max_new_tokens=NEW_TOKENS,
        do_sample=True,
        top_k=20,
        return_dict_in_generate=True,
    )
    spans = output.spans[0]
    tokens = output.sequences[0, : max((end for _, end in spans), default=1)].tolist()
    return {
        "text": tokenizer.decode(tokens).removeprefix(" "),
        "tokens": [tokenizer.decode([token]).strip() or "_" for token in tokens],
        "spans": spans,
        "labels": output.labels[0] if getattr(output, "labels", None) else None,
    }


TASKS = {"verify": probe_folder, "report": parse_and_generate}


def main(task: str, folder: str, request_file: str, answer_file: str) -> None:
    """Answer a request of `run_without_package`, in a process where `import hf_synlm` fails.

    Args:
        task: a name in `TASKS`.
        folder: the model.
        request_file: where to read the request.
        answer_file: where to write the answer.
    """
    sys.modules["hf_synlm"] = None  # type: ignore[assignment]  # from here on, `import hf_synlm` is an ImportError
    request = torch.load(request_file, weights_only=True)
    torch.set_num_threads(request["num_threads"])
    torch.save(TASKS[task](folder, request), answer_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
