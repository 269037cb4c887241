# SPDX-License-Identifier: Apache-2.0
"""Demo of the Space: trees in, scores out."""

from pathlib import Path

import evaluate
from evaluate.utils import launch_gradio_widget

launch_gradio_widget(evaluate.load(str(Path(__file__).with_name("unlabeled_parsing_f1.py"))))
