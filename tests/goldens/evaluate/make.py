"""Store what the modules `glue` and `rouge` of the package `evaluate` compute: `python make.py METRICS`.

METRICS is the folder `metrics` of a checkout of github.com/huggingface/evaluate. Writes `cases.json` beside this file.
"""

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import evaluate

from hf_synlm.data.samples import sample_path
from hf_synlm.evaluation.glue import GLUE_TASKS

HERE = Path(__file__).parent


def glue_cases(metrics: Path) -> list[dict[str, Any]]:
    """Random labels for every task: few and many, far from and near to the gold ones."""
    draw, cases = random.Random(1), []
    for name, task in GLUE_TASKS.items():
        module = evaluate.load(str(metrics / "glue"), name)
        for size, right in ((7, 0.5), (40, 0.8), (40, 0.2)):
            if task.is_regression:
                gold = [round(draw.uniform(0, 5), 1) for _ in range(size)]
                predictions: list[Any] = [round(right * y + (1 - right) * draw.uniform(0, 5), 2) for y in gold]
            else:
                gold = [draw.randrange(task.num_labels) for _ in range(size)]
                predictions = [y if draw.random() < right else draw.randrange(task.num_labels) for y in gold]
            scores = module.compute(predictions=predictions, references=gold)
            numbers = {key: float(value) for key, value in scores.items()}
            cases.append({"task": name, "predictions": predictions, "references": gold, "scores": numbers})
    return cases


def rouge_cases(metrics: Path) -> list[dict[str, Any]]:
    """Texts of one to three sentences, one per line, against the same with words left out, put in and moved."""
    # Without punctuation, so that nobody sees further sentences in them.
    text = re.sub(r"[^\w\n-]+", " ", sample_path("raw.test.txt").read_text(encoding="utf-8"))
    lines = [line.strip() for line in text.split("\n") if line.strip()][:60]
    draw, module = random.Random(2), evaluate.load(str(metrics / "rouge"))

    def changed(text: str) -> str:
        words = [word for word in text.split(" ") if draw.random() < 0.7]
        if draw.random() < 0.5:
            middle = len(words) // 2
            words = words[middle:] + words[:middle]
        return " ".join([*words, *draw.choice(lines).split()[:3]])

    texts = ["\n".join(lines[k : k + 1 + k // 3 % 3]) for k in range(0, 54, 3)]
    cases = []
    for stemmer, several in ((False, False), (True, False), (False, True)):
        predictions = ["\n".join(changed(line) for line in text.split("\n")) for text in texts]
        references: list[Any] = [[text, changed(text)] for text in texts] if several else list(texts)
        scores = module.compute(
            predictions=predictions, references=references, use_stemmer=stemmer, use_aggregator=False
        )
        cases.append({"use_stemmer": stemmer, "predictions": predictions, "references": references, "scores": scores})
    return cases


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    found = {"glue": glue_cases(folder), "rouge": rouge_cases(folder)}
    lines = ",\n".join(
        f'"{name}": [\n' + ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases) + "\n]"
        for name, cases in found.items()
    )
    (HERE / "cases.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
