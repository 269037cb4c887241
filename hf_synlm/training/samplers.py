"""The samples and the random state of a micro step, as functions of the seed and of the number of consumed samples.

Nothing depends on history, so that a resumed run reads and draws the same as an uninterrupted one.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset, Sampler

from hf_synlm.training.arguments import TrainingArguments


def seed_micro_step(seed: int, micro_step: int, rank: int) -> None:
    """Set all random states from (seed, micro step, rank).

    Args:
        seed: of the run.
        micro_step: number of the micro step since the start of training.
        rank: of the process; the ranks draw different noise.
    """
    numpy_seed, torch_seed = np.random.SeedSequence([seed, micro_step, rank]).generate_state(2)
    random.seed(int(numpy_seed))
    np.random.seed(int(numpy_seed))
    torch.manual_seed(int(torch_seed))


class StepSampler(Sampler[list[int]]):
    """Endless micro batches whose sample ids are a pure function of (seed, consumed samples).

    Sample k of the run is entry k mod n of the permutation of epoch k // n. A micro step consumes one batch per
    process, in the order of the ranks. There is no other state, and the samples of a micro step over all processes
    do not depend on how many processes share them.

    Args:
        num_samples: n, size of the data set.
        batch_size: samples per process and micro step.
        seed: of the permutations.
        rank: of this process.
        world_size: number of processes.
        consumed: samples that all processes together have consumed.
        shuffle: `False` keeps the order of the data set.

    Raises:
        ValueError: when the data set is empty.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        consumed: int = 0,
        shuffle: bool = True,
    ):
        if num_samples < 1:
            raise ValueError("The training data are empty. Check the files and the sentence splitting.")
        self.num_samples, self.batch_size, self.seed = num_samples, batch_size, seed
        self.rank, self.world_size, self.consumed, self.shuffle = rank, world_size, consumed, shuffle
        self._epoch, self._order = -1, np.arange(num_samples)

    @property
    def consumed_per_micro_step(self) -> int:
        """How many `consumed` counts for a micro step of all processes."""
        return self.batch_size * self.world_size

    def sample_id(self, k: int) -> int:
        """Data set index of sample k of the run."""
        epoch, position = divmod(k, self.num_samples)
        if self.shuffle and epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.num_samples)
        return int(self._order[position])

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this process's share of one micro batch after the other."""
        consumed = self.consumed
        while True:
            first = consumed + self.rank * self.batch_size
            yield [self.sample_id(k) for k in range(first, first + self.batch_size)]
            consumed += self.consumed_per_micro_step


class PaddedBatchSampler(Sampler[list[int]]):
    """Endless micro batches of samples of similar length, limited in number and in padded size.

    The samples are sorted by length and divided into groups. In every epoch each group is shuffled and cut into
    batches, each as large as both limits allow, and the batches of all groups are shuffled. Batch k of the run is a
    function of (seed, k) for any number of processes; a micro step consumes one batch per process, in the order of the
    ranks. A sample that exceeds the limit alone is a batch by itself.

    Source: Noji and Oseki (2021), section 5.1.

    Args:
        lengths: of the samples; all samples of a batch are padded to the longest one.
        max_batch_size: largest number of samples of a batch.
        max_padded_length: largest padded size of a batch: number of samples times the longest length.
        group_size: samples of similar length among which batches are drawn.
        seed: of the permutations.
        rank: of this process.
        world_size: number of processes.
        consumed: batches that all processes together have consumed.

    Raises:
        ValueError: when the data set is empty, or a limit is less than 1.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        max_batch_size: int,
        max_padded_length: int,
        group_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        consumed: int = 0,
    ):
        if not len(lengths):
            raise ValueError("The training data are empty. Check the files and the limits on sentence length.")
        for name, value in (("batch size", max_batch_size), ("budget", max_padded_length), ("group size", group_size)):
            if value < 1:
                raise ValueError(f"The {name} must be at least 1 and is {value}.")
        self.lengths = np.asarray(lengths)
        self.max_batch_size, self.max_padded_length = max_batch_size, max_padded_length
        self.group_size, self.seed = group_size, seed
        self.rank, self.world_size, self.consumed = rank, world_size, consumed
        self._by_length = np.argsort(self.lengths, kind="stable")

    @property
    def consumed_per_micro_step(self) -> int:
        """How many `consumed` counts for a micro step of all processes."""
        return self.world_size

    def epoch_batches(self, epoch: int) -> list[list[int]]:
        """All batches of an epoch, in their order. Cost: O(n)."""
        generator = np.random.default_rng([self.seed, epoch])
        batches: list[list[int]] = []
        for first in range(0, len(self._by_length), self.group_size):
            group = generator.permutation(self._by_length[first : first + self.group_size])
            batches += self._cut(group.tolist(), self.lengths[group].tolist())
        return [batches[k] for k in generator.permutation(len(batches))]

    def _cut(self, samples: list[int], lengths: list[int]) -> list[list[int]]:
        """Cut samples into batches, each as large as the limits allow."""
        batches: list[list[int]] = []
        longest = 0
        for sample, length in zip(samples, lengths, strict=True):
            size = len(batches[-1]) + 1 if batches else 1
            longest = max(longest, length)
            if not batches or size > self.max_batch_size or size * longest > self.max_padded_length:
                batches.append([])
                longest = length
            batches[-1].append(sample)
        return batches

    def num_batches(self, num_epochs: int) -> int:
        """Number of batches of the first epochs; it differs a little from epoch to epoch."""
        return sum(len(self.epoch_batches(epoch)) for epoch in range(num_epochs))

    def num_samples(self, num_batches: int) -> int:
        """Number of samples in the first batches of the run."""
        batches = itertools.chain.from_iterable(self.epoch_batches(epoch) for epoch in itertools.count())
        return sum(len(batch) for batch in itertools.islice(batches, num_batches))

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this process's batch of one micro step after the other."""
        number = self.consumed + self.rank
        epoch, first = 0, 0
        batches = self.epoch_batches(epoch)
        while True:
            while number >= first + len(batches):
                first += len(batches)
                epoch += 1
                batches = self.epoch_batches(epoch)
            yield batches[number - first]
            number += self.world_size


def make_loader(
    accelerator: Accelerator,
    dataset: Dataset,
    collate: Callable[[list[Any]], dict[str, Any]],
    arguments: TrainingArguments,
    sampler: Sampler,
) -> DataLoader:
    """Endless loader of the training batches; accelerate must not prepare it.

    Args:
        accelerator: of the run.
        dataset: the samples.
        collate: samples -> batch.
        arguments: of the run.
        sampler: of the batches of this process.

    Returns:
        The loader.
    """
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=arguments.dataloader_num_workers,
        pin_memory=accelerator.device.type == "cuda",
        # Otherwise a loader draws from the global random state, and a resumed run would differ.
        generator=torch.Generator(),
    )


def shuffled_loader(
    accelerator: Accelerator,
    dataset: Any,
    collate: Callable[[list[Any]], dict[str, Any]],
    arguments: TrainingArguments,
    consumed: int,
) -> DataLoader:
    """Endless loader of the samples of a data set in random order; see `StepSampler`.

    Args:
        accelerator: of the run.
        dataset: the samples.
        collate: samples -> batch.
        arguments: of the run.
        consumed: samples that all processes together have consumed.

    Returns:
        The loader.
    """
    rank, world_size = accelerator.process_index, accelerator.num_processes
    batch_size = arguments.per_device_train_batch_size
    sampler = StepSampler(len(dataset), batch_size, arguments.seed, rank, world_size, consumed)
    return make_loader(accelerator, dataset, collate, arguments, sampler)
