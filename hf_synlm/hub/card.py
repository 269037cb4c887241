# SPDX-License-Identifier: Apache-2.0
"""Model cards: the README.md of a published model, filled from what is known about it."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from transformers import PreTrainedConfig

from hf_synlm.data.arguments import read_config_file
from hf_synlm.hub.abilities import declared
from hf_synlm.hub.checkpoint import code_repositories

TEMPLATE_FILE = Path(__file__).with_name("card_template.md")
# Parts of the template that only language models have, with trees, with a search over trees or without, or classifiers.
_SECTION = re.compile(
    r"<!-- (language model|classifier|parser|search|no search|trees|no trees) -->\n(.*?)<!-- end -->\n", re.DOTALL
)
# Pipeline of the Hub -> what the model is.
TASKS = {
    "text-generation": "language model",
    "text-classification": "text classifier, made from a language model",
    "token-classification": "for constituency trees",
}
TAGS = ("custom_code", "hf_synlm", "syntactic-language-model")

# By model_type, or by it and the grammar: name of the architecture, what it does, and its papers.
PAPERS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("papers.yaml").read_text(encoding="utf-8"))


def paper_of(config: PreTrainedConfig) -> dict[str, Any]:
    """What `PAPERS` says of a model; grammars that are counted have an entry of their own."""
    return PAPERS.get(f"{config.model_type}_{getattr(config, 'grammar', '')}") or PAPERS.get(config.model_type, {})


# Numbers that depend on how the sum over trees was approximated.
ESTIMATED_METRICS = {"perplexity", "word_perplexity", "surprisal", "log_likelihood", "accuracy"}
ESTIMATED_METRICS |= {"f1", "labeled_f1", "unlabeled_f1"}
REQUIRED_RESULT_KEYS = ("task", "dataset", "split", "metric", "value")
RESULT_COLUMNS = ("task", "dataset", "split", "metric", "value", "num_beams", "estimator", "convention", "seed")
RESULT_KEYS = {*RESULT_COLUMNS, "hardware", "baselines", "command", "dataset_id", "dataset_config"}
# What a number says, and the metric of the Hub that it belongs to.
METRICS = {
    "unlabeled_f1": ("f1", "agreement of its constituents with those of the treebank, in per cent"),
    "labeled_f1": ("f1", "agreement of its labeled constituents with those of the treebank, in per cent"),
    "word_perplexity": (
        "perplexity",
        "a word is as hard to guess as one of this many equally likely words",
    ),
    "mean_over_suites": ("accuracy", "share of SyntaxGym's predictions that its surprisals fulfil"),
    "accuracy": ("accuracy", "share of the pairs in which it prefers the grammatical sentence; chance is 0.5"),
}
_HEADERS = {"dataset": "data", "num_beams": "beam"}
FACTS_FILE = "card.yaml"
"""Beside a card: the facts that it was made from, for the next export."""
DEFAULT_FACTS: dict[str, Any] = {
    "task": "text-generation",
    "license": None,
    "language": None,
    "datasets": [],
    "base_model": None,
    "example": "fruit flies like a banana",
    "tree": "",
    "code_url": None,
    "availability": "",
    "intended_use": (
        "Research on syntax in language models: parsing without or with a treebank, surprisal of words, generation of "
        "sentences with their trees. It is not an assistant, and not a source of facts."
    ),
    "training_data": "Not stated by the publisher of this repository.",
    "training_procedure": "Not stated by the publisher of this repository.",
    "results": [],
    "weights": {},
    "not_for": (
        "The numbers are those of one trained model, on the data and by the convention that are named. Do not rank "
        "architectures by them: that takes several seeds, and equal data and sizes. Do not compare them with numbers "
        "of another convention, beam, estimator or vocabulary."
    ),
    "limits": "",
}


def fill_card(config: PreTrainedConfig, facts: Mapping[str, Any]) -> str:
    """Text of a model card, front matter included.

    `facts` are those of `DEFAULT_FACTS` and `repo_id`, which is required:

    - `license` and `language` (of the weights and the text), `base_model` (Hub name of the model that was fine-tuned)
      and
      `datasets` (Hub names) are left out unless they are given;
    - `task`: "text-generation", "text-classification" for a model with a classifier, or "token-classification" for a
      parser; `example`: a text that the code on the card reads; `tree`: a drawing in characters of its tree;
      `code_url`: address of the repository of the code;
    - paragraphs: `availability` (where the files are), `intended_use`, `training_data`, `training_procedure`, `not_for`
      (what the numbers may not be used for), `limits`;
    - `results`: dicts with `task`, `dataset`, `split`, `metric`, `value` and, where the number depends on the beam,
      `num_beams` and `estimator` ("stepwise" or "beam marginal" for probabilities, "search", "inside" or "mbr" for
      trees); optionally `convention` ("name: what is counted"), `seed`, `hardware`, `baselines` (the same number of
      trees that need no model, by name), `command`, and of data on the Hub `dataset_id` and `dataset_config`, without
      which a number is no metadata. `hf_synlm.evaluation.results.card_rows` makes them;
    - `weights`: SHA-256 of the files that were measured, by name; `export_model` states them.

    Raises ValueError if a fact is unknown or missing, or if a number lacks its beam width or estimator.
    """
    unknown = set(facts) - set(DEFAULT_FACTS) - {"repo_id"}
    if "repo_id" not in facts:
        raise ValueError("The card needs repo_id. Pass it.")
    if unknown:
        raise ValueError(f"A card has no field {sorted(unknown)}. Its fields are {['repo_id', *DEFAULT_FACTS]}.")
    if config.model_type not in PAPERS:
        raise ValueError(f"hub/papers.yaml does not name the paper of {config.model_type!r}. Pass the text as card.")
    stated = {**DEFAULT_FACTS, **facts}
    for result in stated["results"]:
        _check_result(result)
    values = {
        "article": "A",
        **paper_of(config),
        **stated,
        "kind": TASKS.get(stated["task"], ""),
        "front_matter": _front_matter(config, stated),
        "name": stated["repo_id"].rpartition("/")[2],
        "beginning": " ".join(stated["example"].split()[:2]),
        "results": _results_table(stated["results"], stated["repo_id"]),
        "headline": _headline(stated["results"]),
        "tree": f"```text\n{stated['tree']}\n```" if stated["tree"] else "",
        "citation": " ".join([paper_of(config)["citation"], *_papers(config)]),
        "weights_licence": f"The licence of the weights is {stated['license']}." if stated["license"] else "",
        "library": f"[hf_synlm]({stated['code_url']})" if stated["code_url"] else "hf_synlm",
        "code": _code(config),
        "packages": _packages(config),
        "not_for": stated["not_for"] if stated["results"] else "",
        "num_beams": str(getattr(config, "scoring_num_beams", None)),
    }
    kinds = _sections(config, stated["task"])
    template = TEMPLATE_FILE.read_text(encoding="utf-8")
    template = _SECTION.sub(lambda match: match[2] if match[1] in kinds else "", template)
    text = re.sub(r"{{ (\w+) }}", lambda match: values[match.group(1)], template)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def _code(config: PreTrainedConfig) -> str:
    """Where the code of a model is, for the card."""
    elsewhere = code_repositories(config.auto_map)
    if not elsewhere:
        return "The repository holds its own code"
    return f"Its code lies in the repository {', '.join(f'`{name}`' for name in elsewhere)} of the Hub"


def _papers(config: PreTrainedConfig) -> list[str]:
    """Links by which the Hub finds the papers."""
    return [f"[arXiv:{number}](https://arxiv.org/abs/{number})" for number in paper_of(config)["arxiv"]]


def _headline(results: Sequence[Mapping[str, Any]]) -> str:
    """The first number, and what it says."""
    if not results or results[0]["metric"] not in METRICS:
        return ""
    first = results[0]
    right = first.get("baselines", {}).get("right")
    others = f". Trees that always branch to the right have {right:.4g}" if right else ""
    number = f"**{first['metric'].replace('_', ' ').replace('f1', 'F1')} {_result_cell('value', first['value'])}**"
    return f"{number} on {first['dataset']}: {METRICS[first['metric']][1]}{others}."


def _packages(config: PreTrainedConfig) -> str:
    """What a model needs besides transformers, for the card."""
    of = getattr(config, "adapter_of", None)
    if of is None:
        return "no other package"
    where = f"`{of['name']}`, which are loaded from the Hub" if of["name"] else "a folder"
    return (
        f"`peft`. It is an adapter. The weights of its backbone are those of {where}. "
        '`from_pretrained(..., backbone="FOLDER")` takes them from elsewhere'
    )


def facts_text(facts: Mapping[str, Any]) -> str:
    """The facts of a card as YAML."""
    return yaml.safe_dump(dict(facts), sort_keys=False, allow_unicode=True, width=120)


def saved_card(model: str, revision: str | None = None) -> tuple[dict[str, Any] | None, str | None]:
    """Facts of card.yaml and text of README.md, of a folder or a name on the Hub; None for a missing file."""
    facts, text = (_saved_file(model, name, revision) for name in (FACTS_FILE, "README.md"))
    return None if facts is None else read_facts(facts), None if text is None else text.read_text(encoding="utf-8")


def missing_on_card(model: str) -> list[str]:
    """Remarks on what a reader of the Hub needs and the card of a folder lacks."""
    facts, text = saved_card(model)
    if text is None:
        return ["there is no README.md: the model has no card"]
    data = ModelCard(text, ignore_metadata_errors=True).data
    other = [name for name in ("license", "language") if (facts or {}).get(name) not in (None, getattr(data, name))]
    if other:
        return [
            f"{FACTS_FILE} and README.md differ in {' and '.join(other)}: `synlm export` makes README.md "
            f"from {FACTS_FILE}. Export the folder to a new one, and push that"
        ]
    if data.license is None:
        return [
            "the card names no licence, so nobody may use the model: add a line `license: ...` below the first --- of "
            f"README.md, and to {FACTS_FILE}, from which an export makes the card"
        ]
    return []


def _saved_file(model: str, name: str, revision: str | None) -> Path | None:
    if Path(model).is_dir():
        return path if (path := Path(model) / name).is_file() else None
    try:
        return Path(hf_hub_download(model, name, revision=revision))
    except LocalEntryNotFoundError:  # not in the cache, and the Hub cannot be asked
        raise
    except EntryNotFoundError:
        return None


def read_facts(path: Path) -> dict[str, Any]:
    """The facts of a card in a YAML or JSON file."""
    return read_config_file(path, "facts to values, such as `license: cc0-1.0`")


def _sections(config: PreTrainedConfig, task: str) -> set[str]:
    """Parts of the template for a model: language model or classifier, with a search or not, with trees or not."""
    if task not in TASKS:
        raise ValueError(f"task {task!r} is unknown. Choose one of {', '.join(TASKS)}.")
    if task != "text-generation":
        return {"classifier" if task == "text-classification" else "parser"}
    return {
        "language model",
        "search" if declared(config, "searches") else "no search",
        "trees" if declared(config, "gives_trees") else "no trees",
    }


def _check_result(result: Mapping[str, Any]) -> None:
    unknown, missing = set(result) - RESULT_KEYS, set(REQUIRED_RESULT_KEYS) - set(result)
    if unknown or missing:
        raise ValueError(f"Result {dict(result)}: add {sorted(missing)}, and remove {sorted(unknown)}.")
    if result["metric"].lower() in ESTIMATED_METRICS and not {"num_beams", "estimator"} <= set(result):
        raise ValueError(
            f"Result {dict(result)} depends on the beam. State `num_beams` and `estimator` (None if no beam was used)."
        )


def _front_matter(config: PreTrainedConfig, facts: Mapping[str, Any]) -> str:
    results = [
        EvalResult(
            # The Hub's task of parsers; its other tasks are those of the models.
            task_type="token-classification" if result["task"] == "parsing" else facts["task"],
            task_name=result["task"],
            dataset_type=result["dataset_id"],
            dataset_config=result.get("dataset_config"),
            dataset_name=result["dataset"],
            dataset_split=result["split"],
            metric_type=METRICS.get(result["metric"], [result["metric"].lower()])[0],
            metric_name=_metric_name(result),
            metric_value=result["value"],
            source_name="Commands and conventions on this card",
            source_url=f"https://huggingface.co/{facts['repo_id']}#results",
        )
        for result in facts["results"]
        if "dataset_id" in result
    ]
    data = ModelCardData(
        license=facts["license"],
        language=facts["language"],
        library_name="transformers",
        pipeline_tag=facts["task"],
        tags=[*TAGS, config.model_type, *(f"arxiv:{number}" for number in paper_of(config)["arxiv"])],
        datasets=list(facts["datasets"]) or None,
        base_model=facts["base_model"],
        metrics=sorted({result.metric_type for result in results}) or None,
        widget=[{"text": facts["example"]}],
        model_name=facts["repo_id"].rpartition("/")[2],
        eval_results=results or None,
    )
    return data.to_yaml()


def _metric_name(result: Mapping[str, Any]) -> str:
    how = [] if result.get("num_beams") is None else [f"beam {result['num_beams']}"]
    how += [] if result.get("estimator") is None else [result["estimator"]]
    return f"{result['metric']} ({', '.join(how)})" if how else result["metric"]


def _results_table(results: Sequence[Mapping[str, Any]], repo_id: str) -> str:
    """The numbers, and below the table what is too long for it; in commands the model has its name on the Hub."""
    if not results:
        return "No results are published with this model."
    names = [name for name in RESULT_COLUMNS if name in RESULT_COLUMNS[:7] or any(name in result for result in results)]
    lines = [_table_line([_HEADERS.get(name, name) for name in names]), _table_line(["---"] * len(names))]
    lines += [_table_line([_result_cell(name, result.get(name)) for name in names]) for result in results]
    conventions = dict.fromkeys(result["convention"] for result in results if result.get("convention"))
    meanings = {result["metric"]: METRICS[result["metric"]][1] for result in results if result["metric"] in METRICS}
    lines += ["", *(f"- {metric}: {meaning}." for metric, meaning in meanings.items())]
    lines += [f"- Convention {text}." for text in conventions]
    for result in results:
        numbers = ", ".join(f"{name} {value:g}" for name, value in result.get("baselines", {}).items())
        line = f"- Trees without a model, {result['metric']} ({_short(result.get('convention', ''))}): {numbers}."
        lines += [line] if numbers and line not in lines else []
    hardware = dict.fromkeys(result["hardware"] for result in results if result.get("hardware"))
    lines += [f"- Computed on {text}." for text in hardware]
    commands = dict.fromkeys(_public(result["command"], repo_id) for result in results if result.get("command"))
    if commands:
        lines += ["", "Commands:", "", "```bash", *commands, "```"]
    return "\n".join(lines)


def _public(command: str, repo_id: str) -> str:
    """A command with the published name of its model; several models are others' too."""
    named = re.findall(r"--model[ =]\S+", command)
    return command.replace(named[0], f"--model {repo_id}") if len(named) == 1 else command


def _table_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _result_cell(name: str, value: Any) -> str:
    if name == "convention":
        return _short(value or "")
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _short(convention: str) -> str:
    """The name of a convention, without what it counts."""
    return convention.partition(":")[0]
