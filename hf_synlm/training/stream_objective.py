"""The loss of a recurrent language model on segments of a stream, one after the other."""

from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn

from hf_synlm.recurrent_cache import RecurrentCache
from hf_synlm.training.stream_schedule import PhasedOptimizer


class StreamObjective:
    """Loss of a batch that starts from the hidden-state cache of the previous one.

    The cache is part of checkpoints: `accelerate` saves and loads it by `state_dict` and `load_state_dict`.

    Args:
        accelerator: of the run.
        optimizer: takes the scale of the learning rate from the batch.
        carry: keep the cache from batch to batch.
    """

    def __init__(self, accelerator: Accelerator, optimizer: PhasedOptimizer, carry: bool):
        self.accelerator, self.optimizer, self.carry = accelerator, optimizer, carry
        self.cache: RecurrentCache | None = None

    def __call__(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Objective and its named parts, for `optimizer_steps`."""
        batch = dict(batch)
        self.optimizer.scale = batch.pop("rate_scale")
        if batch.pop("begins"):
            self.cache = None
        output = model(**batch, past_key_values=self.cache, use_cache=self.carry)
        if self.carry:
            self.cache = output.past_key_values
        return output.loss, output.losses

    def state_dict(self) -> dict[str, Any]:
        """Cache of the rows of all processes, rows first; every process has to call."""
        if self.cache is None or self.cache.state is None:
            return {}
        rows_first = [tensor.movedim(self.cache.batch_dim, 0).contiguous() for tensor in self.cache.state]
        gathered = [self.accelerator.gather(tensor).cpu() for tensor in rows_first]
        return {"state": gathered, "batch_dim": self.cache.batch_dim, "num_columns": self.cache.num_columns}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the cache of the rows of this process."""
        self.cache = None
        if not state:
            return
        index, count = self.accelerator.process_index, self.accelerator.num_processes
        shares = [tensor.chunk(count)[index].to(self.accelerator.device) for tensor in state["state"]]
        self.cache = RecurrentCache()
        rows = tuple(share.movedim(0, state["batch_dim"]) for share in shares)
        self.cache.store(rows, state["num_columns"], state["batch_dim"])
