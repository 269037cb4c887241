# SPDX-License-Identifier: Apache-2.0
"""Train, measure and publish the checkpoints, by the same commands that everybody else uses.

    python training/make_checkpoints.py                       the tiny ones; `make checkpoints` does the same
    python training/make_checkpoints.py gpst-tiny             one of them
    python training/make_checkpoints.py gpst-mini             a mini, on your copy of its text in runs/data; takes hours
    python training/make_checkpoints.py --begin-with evaluate   measure the models of model_cards/ again
    python training/make_checkpoints.py --begin-with card       make cards and archives from the existing results

`model_cards/checkpoints.yaml` specifies the checkpoints. For each of them:

    runs/checkpoints/NAME           the run of the training script; that of a mini continues where it was stopped
    model_cards/NAME                weights, configuration, tokenizer, results/*.json, card.yaml, README.md (the card)
    dist/checkpoints/NAME.tar.gz    a release asset: the same model with its code, as `synlm export` writes it

A card states only what the results contain, and can be made again from them. Equal inputs give equal bytes.
"""

import argparse
import gzip
import io
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from release.model_table import COMMAND, PAGE, model_table, write_between
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import hf_synlm  # noqa: F401  # registers the architectures
from hf_synlm.cli import main as synlm
from hf_synlm.core.backbone_adapter import ADAPTER_FOLDER
from hf_synlm.data.files import folder_writer, read_json, write_bytes, write_json, write_text
from hf_synlm.evaluation.results import card_rows, load_result
from hf_synlm.evaluation.trees.treebank_parsing import parse_sentences
from hf_synlm.hub.card import facts_text, fill_card
from hf_synlm.hub.checkpoint import num_parameters, stored_tensors, weight_checksums
from hf_synlm.hub.loading import load_pretrained
from hf_synlm.training.arguments.base import find_config
from hf_synlm.training.engine.output_folder import RESULTS_FILE
from hf_synlm.training.engine.recipe import Recipe
from hf_synlm.viz import tree_to_text

ROOT = Path(__file__).resolve().parents[2]
RUNS, CARDS, ARCHIVES = Path("runs/checkpoints"), Path("model_cards"), Path("dist/checkpoints")
SPECIFICATIONS = CARDS / "checkpoints.yaml"
MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
WEIGHTS = "model.safetensors"
ADAPTER = (f"{ADAPTER_FOLDER}/adapter_config.json", f"{ADAPTER_FOLDER}/adapter_model.safetensors")
# In `try`, for transformers would tell to install a package of our name from the index, which has none.
STUB = '''# SPDX-License-Identifier: Apache-2.0
"""The code is that of the installed package; `synlm export` writes a folder that loads without it."""

try:
    from {source} import {names}
except ImportError as error:
    message = "this folder needs hf_synlm: `pip install .` in its checkout. `synlm export` makes one that needs nothing"
    raise ImportError(message) from error

__all__ = {quoted}
'''
TREE_FILE = "tree.txt"
STAGES = ("train", "evaluate", "card")
# accelerate asks no questions and ignores the user's own `accelerate config`.
LAUNCH = (
    "accelerate launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no "
    "--num_cpu_threads_per_process 1"
)
# What the validation score of a script is called, if not as in programs of gold trees.
_LOSSES = {"pretrain_gpst.py": "loss", "train_recurrent.py": "perplexity", "train_pcfg.py": "perplexity"}
_LOSSES["train_span_parser.py"] = "labeled_f1"


def read_specifications() -> dict[str, dict[str, Any]]:
    """Specification of every checkpoint, in the order of the file, with what holds for all of its kind."""
    found = yaml.safe_load((ROOT / SPECIFICATIONS).read_text(encoding="utf-8"))
    specifications = {}
    for kind in ("tiny", "mini"):
        common = found[kind]["common"]
        for name, checkpoint in found[kind]["checkpoints"].items():
            limits = f"{common['limits'].strip()}\n{checkpoint['limits'].strip()}".replace("\n\n- ", "\n- ")
            specifications[name] = {"kind": kind, **common, **checkpoint, "limits": limits}
            specifications[name]["hub_datasets"] = found["hub_datasets"]
    return specifications


# ---------------------------------------------------------------------------------------------------- commands
def training_phases(name: str, checkpoint: dict[str, Any]) -> list[tuple[Path, str]]:
    """Output folder and command of each phase of training; `data` is a list if there is more than one."""
    given = checkpoint.get("data", "")
    phases = given if isinstance(given, list) else [given]
    folders = [RUNS / f"{name}-{number}" for number in range(1, len(phases))] + [RUNS / name]
    launch = LAUNCH.replace("precision no", f"precision {checkpoint.get('mixed_precision', 'no')}")
    program, found = f"{launch} training/{checkpoint['script']} --config {checkpoint['config']}", []
    for number, (folder, data) in enumerate(zip(folders, phases, strict=True)):
        # A later phase has a seed of its own.
        seed = f"--seed {checkpoint['seed'] + 10 * number}" if "seed" in checkpoint else ""
        found.append((folder, " ".join(f"{program} {data} {seed} --output-dir {folder}".split())))
    return found


def evaluations(name: str, checkpoint: dict[str, Any]) -> dict[str, dict[str, str]]:
    """By the name of its result, the command of each evaluation of a checkpoint, its `dataset` and its `split`."""
    found = {}
    for result, given in checkpoint["evaluations"].items():
        stated = {"dataset": checkpoint.get("dataset", ""), "split": "test", "files": checkpoint.get("files", "")}
        stated |= given if isinstance(given, dict) else {"options": given}
        task, _, options = stated.pop("options").partition(" ")
        files = stated.pop("files")
        data = {"parsing": f"--treebank {files}", "perplexity": f"{files} --format treebank"}.get(task, files)
        found[result] = {**stated, "command": f"synlm evaluate {task} {data} --model {CARDS / name} {options}"}
    return found


def run(command: str, *more: str) -> float:
    """Run `accelerate launch` or `synlm` with this Python and one thread; returns the CPU time in seconds."""
    print(f"$ {command}", flush=True)
    words = [*shlex.split(command), *more]
    modules = {"accelerate": ["accelerate.commands.accelerate_cli"], "synlm": ["hf_synlm.cli"]}
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", *modules[words[0]], *words[1:]], cwd=ROOT, env=environment, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


# ---------------------------------------------------------------------------------------------------- stages
def train(name: str, checkpoint: dict[str, Any]) -> None:
    """Train, and put the model without card and code into `model_cards/NAME`, which is replaced.

    A mini that was stopped is continued, and one that is finished is only copied.
    """
    is_tiny, cpu_seconds = checkpoint["kind"] == "tiny", 0.0
    anew = is_tiny  # a phase behind one that was trained replaces what is there
    model, folder = ROOT / RUNS / name / "model", ROOT / CARDS / name
    phases = training_phases(name, checkpoint)
    for output, command in phases:
        if anew or not (ROOT / output / RESULTS_FILE).is_file():
            cpu_seconds += run(command, *(["--overwrite-output-dir"] if anew else []))
            anew = True
    found = read_json(ROOT / RUNS / name / RESULTS_FILE)
    best = found.get("best_step", found["step"])
    score = _LOSSES.get(checkpoint["script"], Recipe.score)
    before, after = (item["losses"][score] for item in found["evaluations"] if item["step"] in (0, best))
    settings = yaml.safe_load(Path(find_config(checkpoint["config"])).read_text(encoding="utf-8"))
    training = {
        "command": "\n".join(command for _, command in phases),
        "config": checkpoint["config"],
        "settings": {**settings, "seed": checkpoint.get("seed", settings["seed"])},
        "steps": found["step"],
        "best_step": best,
        "validation": {"score": score, "before": before, "after": after},
        **({"cpu_seconds": round(cpu_seconds, 1)} if is_tiny else {}),
        "versions": found["versions"],
        "hardware": found["hardware"],
    }
    with folder_writer(folder) as partial:
        files = [model / file for file in (*MODEL_FILES, WEIGHTS, *ADAPTER)]
        for file in (file for file in files if file.is_file()):
            copy = partial / file.relative_to(model)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)
            if copy.suffix == ".safetensors":  # half the size; the configuration says that float32 is loaded
                tensors = with_rank(load_file(copy), checkpoint.get("lora_rank"), copy.with_name("adapter_config.json"))
                halves = {name: t.half() if t.is_floating_point() else t for name, t in tensors.items()}
                save_file(halves, copy, {"format": "pt"})
            elif copy.name == "tokenizer.json":
                content = read_json(copy)
                if merges := content["model"].get("merges"):  # "a b" is shorter than ["a", "b"], and the same
                    content["model"]["merges"] = [x if isinstance(x, str) else " ".join(x) for x in merges]
                write_text(copy, json.dumps(content, ensure_ascii=False, separators=(",", ":")))
        size, limit = sum(file.stat().st_size for file in partial.rglob("*.*")), checkpoint["max_bytes"]
        if size >= limit:
            raise ValueError(f"{name} has {size} bytes, but only {limit} are allowed. Make the model smaller.")
        write_json(partial / "results" / "training.json", training)


def with_rank(tensors: dict[str, torch.Tensor], rank: int | None, config: Path) -> dict[str, torch.Tensor]:
    """Weights of LoRA whose products B A keep their `rank` largest singular values, told in `config`; None = all."""
    if rank is None:
        return tensors
    settings = read_json(config)
    write_json(config, {**settings, "r": rank, "lora_alpha": settings["lora_alpha"] * rank // settings["r"]})
    for name in [name for name in tensors if ".lora_A." in name]:
        other = name.replace(".lora_A.", ".lora_B.")
        (q, left), (p, right) = (torch.linalg.qr(t.double()) for t in (tensors[other], tensors[name].mT))
        u, values, v = torch.linalg.svd(left @ right.mT)
        root = values[:rank].sqrt()
        tensors[other], tensors[name] = q @ u[:, :rank] * root, (p @ v[:rank].mT * root).mT.contiguous()
    return tensors


def evaluate(name: str, checkpoint: dict[str, Any]) -> None:
    """Run the evaluations of a checkpoint, and keep their JSON files."""
    results = ROOT / CARDS / name / "results"
    for old in results.glob("*.json"):
        if old.stem != "training":
            old.unlink()
    with tempfile.TemporaryDirectory(prefix="hf_synlm_checkpoints_") as temporary:
        for result, stated in evaluations(name, checkpoint).items():
            command = stated["command"]
            run(command, "--out", str(Path(temporary) / f"{result}.json"))
            found = read_json(Path(temporary) / f"{result}.json")
            # The path of the temporary file is not part of the command that readers repeat.
            write_json(results / f"{result}.json", {**found, "command": command})
    if not checkpoint.get("is_adapter"):  # without its backbone, no test could draw the tree again
        write_text(results / TREE_FILE, f"{draw_example(name, checkpoint)}\n")


def first_choices(name: str, checkpoint: dict[str, Any]) -> dict[str, str]:
    """The method and the backbone of a checkpoint's first evaluation, where it names them."""
    command = next(iter(evaluations(name, checkpoint).values()))["command"]
    return dict(re.findall(r"--(method|backbone) (\S+)", command))


def draw_example(name: str, checkpoint: dict[str, Any]) -> str:
    """The tree of a checkpoint's example, by the method and the backbone of its first evaluation."""
    chosen = first_choices(name, checkpoint)
    model, tokenizer = load_pretrained(str(ROOT / CARDS / name), backbone=chosen.pop("backbone", None))
    (parsed,) = parse_sentences(model, tokenizer, [checkpoint["example"].split()], **chosen)
    best = parsed.hypotheses[0]
    return tree_to_text(parsed.words, best.spans, best.labels, style="upright")


def write_stubs(name: str) -> None:
    """Write the two files by which a checkpoint of this repository loads the code of the installed package."""
    folder = ROOT / CARDS / name
    config = read_json(folder / "config.json")
    classes: dict[str, list[str]] = {}
    for reference in sorted(config["auto_map"].values()):
        file, _, class_name = reference.partition(".")
        classes.setdefault(file, []).append(class_name)
    for file, names in classes.items():
        source = f"hf_synlm.models.{config['model_type']}.{file}"
        text = STUB.format(source=source, names=", ".join(names), quoted=json.dumps(names))
        write_text(folder / f"{file}.py", text)


def card_facts(name: str, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Facts of a checkpoint for `fill_card`, from its results and `model_cards/checkpoints.yaml`."""
    folder = ROOT / CARDS / name
    drawing, ids = folder / "results" / TREE_FILE, checkpoint["hub_datasets"]
    rows = [
        {**row, **ids.get(stated["dataset"].partition(",")[0], {})}
        for result, stated in evaluations(name, checkpoint).items()
        for row in card_rows(load_result(folder / "results" / f"{result}.json"), **stated)
    ]
    facts = ("license", "language", "datasets", "example", "intended_use", "training_data", "not_for", "limits")
    return {
        "repo_id": name,
        **{fact: checkpoint[fact] for fact in (*facts, "base_model", "task") if fact in checkpoint},
        **({"tree": drawing.read_text(encoding="utf-8").rstrip("\n")} if drawing.is_file() else {}),
        "training_procedure": _training_paragraph(name, checkpoint),
        "results": rows,
        "weights": weight_checksums(folder),
    }


def _training_paragraph(name: str, checkpoint: dict[str, Any]) -> str:
    folder = ROOT / CARDS / name
    training = read_json(folder / "results" / "training.json")
    parameters = num_parameters(stored_tensors(folder))
    loss, hardware, versions = training["validation"], training["hardware"], training["versions"]
    score = loss["score"].replace("_", " ")
    place = f"{'one thread of ' * (hardware['device'] == 'cpu')}{hardware['device_name']}"
    phases = training["command"].count("\n") + 1
    steps = f"{phases} phases, the last of {training['steps']} steps" if phases > 1 else f"{training['steps']} steps"
    time = checkpoint.get("time") or f"{training['cpu_seconds']:.0f} s of CPU time, evaluations and report included"
    return (
        f"```bash\n{training['command']}\n```\n\n"
        f"{parameters:,} parameters. {steps}, of "
        f"which step {training['best_step']} is kept; seed {training['settings']['seed']}. Validation {score} "
        f"{loss['before']:.2f} -> {loss['after']:.2f}. {time}, on {place}; Python "
        f"{versions['python']}, torch {versions['torch']}, transformers {versions['transformers']}. "
        f"`python training/make_checkpoints.py {name}` trains, measures and packs it."
    )


def write_card(name: str, checkpoint: dict[str, Any]) -> None:
    """Write `card.yaml`, `README.md` and the stubs of a checkpoint."""
    write_stubs(name)
    folder, facts = ROOT / CARDS / name, card_facts(name, checkpoint)
    write_text(folder / "card.yaml", facts_text(facts))
    write_text(folder / "README.md", fill_card(AutoConfig.from_pretrained(folder), facts))


def pack(name: str, checkpoint: dict[str, Any]) -> Path:
    """Write the self-contained folder of a checkpoint as an archive whose bytes depend only on its files."""
    backbone = first_choices(name, checkpoint).get("backbone")
    archive = ROOT / ARCHIVES / f"{name}.tar.gz"
    with tempfile.TemporaryDirectory(prefix="hf_synlm_checkpoints_") as temporary:
        folder = Path(temporary) / name
        card = ROOT / CARDS / name
        if synlm(["export", str(card), "--out", str(folder), *(["--backbone", backbone] if backbone else [])]):
            raise ValueError(f"{card} could not be exported: see the message above")
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as tar:
            for file in sorted(file for file in folder.rglob("*") if file.is_file()):
                entry = tarfile.TarInfo(f"{name}/{file.relative_to(folder).as_posix()}")
                entry.size, entry.mode = file.stat().st_size, 0o644
                tar.addfile(entry, io.BytesIO(file.read_bytes()))
    write_bytes(archive, gzip.compress(data.getvalue(), mtime=0))
    print(f"{archive}: {archive.stat().st_size:,} bytes")
    return archive


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script."""
    specifications = read_specifications()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    tiny = [name for name, checkpoint in specifications.items() if checkpoint["kind"] == "tiny"]
    parser.add_argument("names", nargs="*", help=f"checkpoints to make; default: {', '.join(tiny)}")
    parser.add_argument("--begin-with", choices=STAGES, default=STAGES[0], help="stage to begin with (default: train)")
    arguments = parser.parse_args(argv)
    unknown = sorted(set(arguments.names) - set(specifications))
    if unknown:
        parser.error(f"unknown checkpoint {', '.join(unknown)}: {SPECIFICATIONS} has {', '.join(specifications)}")
    stages = STAGES[STAGES.index(arguments.begin_with) :]
    for name in arguments.names or tiny:
        checkpoint = specifications[name]
        if "train" in stages:
            train(name, checkpoint)
        if "evaluate" in stages:
            evaluate(name, checkpoint)
        write_card(name, checkpoint)
        pack(name, checkpoint)
    write_between(PAGE, COMMAND, model_table(specifications))
