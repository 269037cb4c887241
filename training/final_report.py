"""What a user gets: load the saved folder where hf_synlm is not installed, parse held-out sentences, generate.

The model runs in a process of its own (`load_saved_model.py`), in which `import hf_synlm` fails; trees come back as
spans and are scored here.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from tree_evaluation import Treebank, score_baselines, score_numbers, score_table, score_trees

from hf_synlm.data.collate import encode_words
from hf_synlm.evaluation.parsing import ParsingScores
from hf_synlm.trees import draw_tree, fold_tokens, spans_to_tree


@dataclass
class FinalReport:
    """Scores of a saved model on held-out trees, and a sentence of its own.

    Fields:
        scores: by kind of tree, the model's first.
        generated: words of the generated sentence.
    """

    scores: dict[str, ParsingScores]
    generated: list[str]

    def numbers(self) -> dict[str, Any]:
        """For JSON."""
        first = next(iter(self.scores.values()))
        return {
            "trees": score_numbers(self.scores),
            "num_sentences": first.num_sentences,
            "convention": first.convention,
            "generated": " ".join(self.generated),
        }

    def summary(self) -> str:
        """The main comparison in one line."""
        parts = [f"{name} {100 * score.sentence_f1:.2f}" for name, score in self.scores.items() if "gold" not in name]
        return "test sentence F1: " + ", ".join(parts)


def report_saved_model(
    folder: Path, tokenizer: PreTrainedTokenizerBase, treebank: Treebank, num_beams: int, seed: int
) -> FinalReport:
    """Load a saved model in a clean process, print its scores and a generated sentence with its tree.

    Args:
        folder: the exported model.
        tokenizer: its tokenizer.
        treebank: held-out trees.
        num_beams: beam of left-to-right parsing; 0 leaves it out.
        seed: of the generated sentence.

    Returns:
        The report.

    Raises:
        RuntimeError: when the clean process fails, with the end of what it wrote.
    """
    encoded = [encode_words(tokenizer, words) for words in treebank.words]
    request = {
        "folder": str(folder.resolve()),
        "texts": [" ".join(words) for words in treebank.words],
        "word_ends": [ends for _, ends in encoded],
        "num_beams": num_beams,
        "prompt": treebank.words[0][0],
        "seed": seed,
    }
    answer = _run_clean_process(request)
    scores = {}
    for name, trees in answer["trees"].items():
        folded = [
            fold_tokens([tuple(span) for span in tree], ends) for tree, (_, ends) in zip(trees, encoded, strict=True)
        ]
        scores[name] = score_trees(folded, treebank)
    scores.update(score_baselines(treebank))
    generated = answer["generated"]
    print(f"loaded {folder} without hf_synlm ({answer['class']}); {len(encoded)} held-out sentences:")
    print(score_table(scores, treebank))
    print(f"generated: {generated['text']}")
    print(
        draw_tree(
            spans_to_tree([tuple(span) for span in generated["spans"]], len(generated["tokens"])), generated["tokens"]
        )
    )
    return FinalReport(scores, generated["tokens"])


def _run_clean_process(request: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="hf_synlm_report_") as temporary:
        place = Path(temporary)
        request_file, answer_file = place / "request.json", place / "answer.json"
        request_file.write_text(json.dumps(request), encoding="utf-8")
        environment = {
            **os.environ,
            "HF_MODULES_CACHE": str(place / "modules"),
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        # The process is no part of the distributed run that it reports on.
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)
        script = Path(__file__).with_name("load_saved_model.py")
        # -I: neither the current folder nor PYTHONPATH nor the user's own packages are on the path.
        command = [sys.executable, "-I", str(script), str(request_file), str(answer_file)]
        run = subprocess.run(
            command, cwd=place, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if run.returncode or not answer_file.is_file():
            raise RuntimeError(f"Loading the saved model without hf_synlm failed:\n{run.stderr[-4000:]}")
        return json.loads(answer_file.read_text(encoding="utf-8"))
