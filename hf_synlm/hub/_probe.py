"""Load a model folder through the Auto classes and compute what `verify` compares.

The file runs in two places: imported by `verify` in a process with hf_synlm, and as a script, `python -I _probe.py
FOLDER REQUEST RESULT`, in a process where `import hf_synlm` fails. So it must not import this package.
"""

import inspect
import sys
import traceback
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from typing import Any

BLOCKED = "hf_synlm"
MODEL_CLASSES = ("AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification")


class BlockPackage(MetaPathFinder):
    """Makes `import hf_synlm` fail as it does where the package was never installed."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """Refuse the package and its modules; leave all others to the next finder."""
        if fullname.partition(".")[0] == BLOCKED:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def probe_folder(folder: str, request: dict[str, Any]) -> dict[str, Any]:
    """Compute one entry per check, without load reports and progress bars.

    Args:
        folder: model folder with an `auto_map`.
        request: `auto_map`; `texts` for the tokenizer; `input_ids` and `attention_mask` [B, T] for the models;
            `num_beams` and `max_new_tokens` for parsing and generation; `seed` for weights that the folder lacks.

    Returns:
        By check, `{"values": {name: tensor, list or text}}` or `{"error": traceback}`.
    """
    from transformers.utils import logging

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
    # What a model does not have, as a parser, is not compared.
    return {name: result for name, result in results.items() if result != {"values": {}}}


def _attempt(probe: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    # A broken class is a finding about the folder; the other classes are still worth a look.
    try:
        return {"values": probe(*arguments)}
    except Exception:
        return {"error": traceback.format_exc(limit=-3)}


def _load(folder: str, auto_class: str, request: dict[str, Any]) -> Any:
    """Load a model. Weights that the folder lacks, as of a new head, get the same values in every process."""
    import torch
    import transformers

    loader = getattr(transformers, auto_class)
    model, info = loader.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    generator = torch.Generator().manual_seed(request["seed"])
    with torch.no_grad():
        for name in sorted(info["missing_keys"]):
            tensor = model.get_parameter(name)
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return model.eval()


def _inputs(request: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": request["input_ids"], "attention_mask": request["attention_mask"]}


def _probe_config(folder: str) -> dict[str, Any]:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    return {"class": type(config).__module__, "config": config.to_json_string(use_diff=False)}


def _probe_tokenizer(folder: str, request: dict[str, Any]) -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    ids = [tokenizer(text)["input_ids"] for text in request["texts"]]
    return {"input_ids": ids, "decoded": [tokenizer.decode(row) for row in ids]}


def _probe_model(folder: str, auto_class: str, request: dict[str, Any]) -> dict[str, Any]:
    import torch

    model = _load(folder, auto_class, request)
    with torch.no_grad():
        output = model(**_inputs(request), **_given_structure(folder, model, request))
    name = "last_hidden_state" if auto_class == "AutoModel" else "logits"
    values = output[name]
    if auto_class != "AutoModelForSequenceClassification":
        # What stands at padding has no meaning.
        values = values[request["attention_mask"].bool()]
    return {"class": type(model).__module__, name: values}


def _given_structure(folder: str, model: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Derivations for a model whose `forward` demands them: those that the language model of the folder finds."""
    actions = inspect.signature(model.forward).parameters.get("actions")
    if actions is None or actions.default is not inspect.Parameter.empty:
        return {}
    return {"actions": _parse(_load(folder, "AutoModelForCausalLM", request), request).actions[:, 0]}


def _probe_parse(folder: str, request: dict[str, Any]) -> dict[str, Any]:
    import torch

    model = _load(folder, "AutoModelForCausalLM", request)
    # An LSTM has no trees, nor has an AWD-LSTM, which is a PaLM without its attention.
    if not hasattr(model, "parse") or not getattr(model.config, "span_attention", True):
        return {}
    with torch.no_grad():
        output = _parse(model, request)
    names = ("spans", "labels", "actions", "log_probs", "token_log_probs")
    return {name: output[name] for name in names if name in output}


def _parse(model: Any, request: dict[str, Any]) -> Any:
    # Models whose trees need no search have no beam.
    beam = {"num_beams": request["num_beams"]} if "num_beams" in inspect.signature(model.parse).parameters else {}
    return model.parse(**_inputs(request), **beam)


def _probe_generate(folder: str, request: dict[str, Any]) -> dict[str, Any]:
    import torch

    model = _load(folder, "AutoModelForCausalLM", request)
    with torch.no_grad():
        output = model.generate(
            **_inputs(request),
            do_sample=False,
            num_beams=1,
            max_new_tokens=request["max_new_tokens"],
            return_dict_in_generate=True,
        )
    return {name: output[name] for name in ("sequences", "actions", "spans", "labels") if name in output}


def main(folder: str, request_file: str, result_file: str) -> None:
    """Read the request, probe the folder without the package, write the result."""
    sys.meta_path.insert(0, BlockPackage())
    import torch

    request = torch.load(request_file, weights_only=True)
    torch.set_num_threads(request["num_threads"])
    torch.save(probe_folder(folder, request), result_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
