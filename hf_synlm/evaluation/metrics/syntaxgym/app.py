# SPDX-License-Identifier: Apache-2.0
"""Demo of the Space: suites and a model in, accuracies out."""

from pathlib import Path

import evaluate
from evaluate.utils import launch_gradio_widget

launch_gradio_widget(evaluate.load(str(Path(__file__).with_name("syntaxgym.py"))))
