# SPDX-License-Identifier: Apache-2.0
"""Train ON-LSTM, PRPN, PaLM, Ordered Memory or AWD-LSTM as language models, with or without gold trees.

    accelerate launch training/train_recurrent.py --config on_lstm_syd_tiny --output-dir runs/tiny

Text comes from treebanks (default: the embedded one) or from plain files. It is read as one stream, segment by segment
with the state carried along (truncated back-propagation through time), or sentence by sentence. The model that is kept
is the one with the best validation likelihood. Papers: Shen et al. (ICLR 2019), Shen et al. (ICLR 2018), Peng et al.
(EMNLP 2019), Shen et al. (NeurIPS 2019), Merity et al. (ICLR 2018); supervised distances: Du et al. (ACL 2020).
"""

from dataclasses import asdict
from functools import partial
from operator import itemgetter
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.training.arguments.text import ScheduleArguments, StreamDataArguments
from hf_synlm.training.engine.runner import run_recipe
from hf_synlm.training.engine.samplers import EpochSampler
from hf_synlm.training.tasks.stream_batches import SegmentDataset, SegmentSampler
from hf_synlm.training.tasks.stream_schedule import (
    EpochControl,
    PhasedOptimizer,
    PhaseSchedule,
    StreamObjective,
    make_phased_optimizer,
)
from hf_synlm.training.tasks.text_recipe import TextRecipe


# ---------------------------------------------------------------------------------------------- the run
class RecurrentRecipe(TextRecipe):
    """Train ON-LSTM, PRPN, PaLM or AWD-LSTM as language models; keep the best validation likelihood."""

    program = "train_recurrent"
    repeated = "batching bptt variable_bptt max_batch_tokens batch_group_size per_device_eval_batch_size"
    needs_whole = "parsing"
    num_optimizers = 2
    data: StreamDataArguments
    schedule: ScheduleArguments
    objective: StreamObjective
    control: EpochControl

    def check(self) -> None:
        """Complete the arguments about trees; refuse what two optimizers and segments in their order do not allow."""
        super().check()
        accumulation = self.arguments.gradient_accumulation_steps
        if self.data.batching == "stream" and accumulation > 1:
            raise ValueError(
                f"--gradient-accumulation-steps is {accumulation}, but the segments of a stream are read in order. "
                "Use a larger --per-device-train-batch-size."
            )

    def make_model(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        """Make an untrained model, or load the one to continue from; PaLM and AWD-LSTM are not mixed up."""
        model, given = super().make_model(tokenizer), self.model_arguments
        if model.config.gives_trees == given.row.is_baseline:
            raise ValueError(
                f"architecture is {given.architecture!r}, but the model has "
                f"span_attention={model.config.span_attention}. Choose 'palm' if it is True, 'awd_lstm' if it is "
                "False."
            )
        return model

    def set_examples(self) -> None:
        """Segments of the stream, or sentences."""
        train, size = self.streams.train, self.arguments.per_device_train_batch_size
        if self.data.batching == "stream":
            rank, count = self.accelerator.process_index, self.accelerator.num_processes
            rows = range(rank * size, (rank + 1) * size)
            self.examples, self.collate = SegmentDataset(train, count * size, rows), itemgetter(0)
        else:
            super().set_examples()

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        """Those of all texts, and the schedule."""
        schedule = {f"schedule_{name}": value for name, value in asdict(self.schedule).items()}
        return {**super().settings(model), **schedule}

    def prepare(self, model: PreTrainedModel) -> tuple[nn.Module, PhasedOptimizer, PhaseSchedule]:
        """Both optimizers of the schedule; the state of the stream becomes part of checkpoints."""
        prepared, optimizer, schedule = make_phased_optimizer(self.accelerator, model, self.schedule, self.arguments)
        self.objective = StreamObjective(self.accelerator, optimizer, carry=self.data.batching == "stream")
        self.accelerator.register_for_checkpointing(self.objective)
        self.control = EpochControl(optimizer, self.schedule, self.arguments)
        return prepared, optimizer, schedule

    def sampler(self, consumed: int = 0) -> EpochSampler:
        """Segments of the stream, or sentences of similar length."""
        data, arguments = self.data, self.arguments
        if data.batching == "sentences":
            return super().sampler(consumed)
        rows = self.accelerator.num_processes * arguments.per_device_train_batch_size
        length, seed = len(self.streams.train), arguments.seed
        return SegmentSampler(length, rows, data.bptt, data.variable_bptt, seed, consumed)

    def compute_loss(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Objective, with the state of the batch before."""
        return self.objective(model, batch)

    def evaluate(self, model: nn.Module, step: int) -> dict[str, Any]:
        """Measure validation text and trees with the averaged weights, if there are some."""
        with self.control.optimizer.averaged_weights():
            return super().evaluate(model, step)

    def best_model(self) -> EpochControl:
        """The epoch with the lowest validation loss; it decides about the phases of the schedule, too."""
        return self.control


main = partial(run_recipe, RecurrentRecipe)
"""Run the program with a command line (default: the process's)."""


if __name__ == "__main__":
    main()
