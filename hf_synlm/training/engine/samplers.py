# SPDX-License-Identifier: Apache-2.0
"""The samples and the random state of a micro step, as functions of the seed and of the number of consumed samples.

Nothing depends on history, so that a resumed run reads and draws the same as an uninterrupted one.
"""

import random
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset, Sampler

from hf_synlm.training.arguments.base import TrainingArguments


def seed_micro_step(seed: int, micro_step: int, rank: int) -> None:
    """Set all random states from the seed, the number of micro steps since the start of training, and the rank."""
    numpy_seed, torch_seed = np.random.SeedSequence([seed, micro_step, rank]).generate_state(2)
    random.seed(int(numpy_seed))
    np.random.seed(int(numpy_seed))
    torch.manual_seed(int(torch_seed))


class StepSampler(Sampler[list[int]]):
    """Endless micro batches whose sample ids are a pure function of (seed, consumed samples).

    Sample k of the run is entry k mod n of the permutation of epoch k // n. A micro step consumes one batch per
    process, in the order of the ranks. There is no other state, and the samples of a micro step over all processes
    do not depend on how many processes share them. `consumed` counts the samples of all processes together.
    """

    def __init__(
        self, num_samples: int, batch_size: int, seed: int, rank: int = 0, world_size: int = 1, consumed: int = 0
    ):
        self.num_samples, self.batch_size, self.seed = num_samples, batch_size, seed
        self.rank, self.consumed, self.consumed_per_micro_step = rank, consumed, batch_size * world_size
        self._epoch, self._order = -1, np.arange(num_samples)

    def consumed_in(self, epochs: int) -> int:
        """Samples of the first epochs."""
        return epochs * self.num_samples

    def sample_id(self, k: int) -> int:
        """Data set index of sample k of the run."""
        epoch, position = divmod(k, self.num_samples)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.num_samples)
        return int(self._order[position])

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this process's share of one micro batch after the other."""
        first = self.consumed + self.rank * self.batch_size
        while True:
            yield [self.sample_id(k) for k in range(first, first + self.batch_size)]
            first += self.consumed_per_micro_step


class EpochSampler(Sampler[list[Any]]):
    """Endless batches, epoch after epoch. A micro step consumes one batch per process, in the order of the ranks.

    `consumed` counts the batches of all processes together.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, consumed: int = 0):
        self.rank, self.consumed, self.consumed_per_micro_step = rank, consumed, world_size

    @abstractmethod
    def epoch_batches(self, epoch: int) -> list[list[Any]]:
        """All batches of an epoch, in their order."""

    def consumed_in(self, epochs: int) -> int:
        """Batches of the first epochs."""
        return sum(len(self.epoch_batches(epoch)) for epoch in range(epochs))

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield this process's batch of one micro step after the other."""
        epoch, number = 0, self.consumed + self.rank
        batches = self.epoch_batches(epoch)
        while True:
            while number >= len(batches):
                number -= len(batches)
                epoch += 1
                batches = self.epoch_batches(epoch)
            yield batches[number]
            number += self.consumed_per_micro_step


class PaddedBatchSampler(EpochSampler):
    """Batches of samples of similar length, limited in number and in padded size.

    The samples are sorted by length and divided into groups. In every epoch each group is shuffled and cut into
    batches, each as large as both limits allow, and the batches of all groups are shuffled. Batch k of the run is a
    function of (seed, k) for any number of processes. A sample that exceeds the limit alone is a batch by itself.
    The padded size is the number of samples times the longest length. Source: Noji and Oseki (2021), section 5.1.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        max_batch_size: int,
        max_padded_length: int,
        group_size: int,
        seed: int,
        **share: int,
    ):
        super().__init__(**share)
        if not len(lengths):
            raise ValueError("The training data are empty. Check the files and the limits on sentence length.")
        self.lengths, self.group_size, self.seed = np.asarray(lengths), group_size, seed
        self.max_batch_size, self.max_padded_length = max_batch_size, max_padded_length
        self._by_length = np.argsort(self.lengths, kind="stable")

    def samples(self, epoch: int) -> np.ndarray:
        """Hook: the samples of an epoch, by length; default: all."""
        return self._by_length

    def epoch_batches(self, epoch: int) -> list[list[int]]:
        """All batches of an epoch, in their order. Cost: O(n)."""
        generator = np.random.default_rng([self.seed, epoch])
        batches: list[list[int]] = []
        samples = self.samples(epoch)
        for first in range(0, len(samples), self.group_size):
            group = generator.permutation(samples[first : first + self.group_size])
            batches += cut_batches(group, self.lengths[group], self.max_batch_size, self.max_padded_length)
        return [batches[k] for k in generator.permutation(len(batches))]


def cut_batches(
    samples: np.ndarray, lengths: np.ndarray, max_batch_size: int, max_padded_length: int
) -> list[list[int]]:
    """Cut sample ids into batches in their order, each as large as the limits of `PaddedBatchSampler` allow."""
    batches: list[list[int]] = []
    longest = 0
    for sample, length in zip(samples.tolist(), lengths.tolist(), strict=True):
        size = len(batches[-1]) + 1 if batches else 1
        longest = max(longest, length)
        if not batches or size > max_batch_size or size * longest > max_padded_length:
            batches.append([])
            longest = length
        batches[-1].append(sample)
    return batches


def padded_batches(lengths: np.ndarray, max_batch_size: int, max_padded_length: int) -> list[list[int]]:
    """All samples once, sorted by `lengths`, in batches within the limits of `cut_batches`: for evaluation."""
    order = np.argsort(lengths, kind="stable")
    return cut_batches(order, lengths[order], max_batch_size, max_padded_length)


class EpochEnds:
    """Steps after which an epoch is over.

    All methods raise ValueError if a step of `batches_per_step` batches would hold the end of more than one epoch.
    """

    def __init__(self, sampler: EpochSampler, batches_per_step: int):
        self.sampler, self.batches_per_step = sampler, batches_per_step
        self._batches: list[int] = []  # of the epochs up to each

    def step(self, epoch: int) -> int:
        """Last step of an epoch (0, 1, ...)."""
        while len(self._batches) <= epoch:
            before = self._batches[-1] if self._batches else 0
            count = len(self.sampler.epoch_batches(len(self._batches)))
            if count < self.batches_per_step:
                raise ValueError(
                    f"An epoch has only {count} batches, but an optimizer step needs {self.batches_per_step}. Use a "
                    "smaller --gradient-accumulation-steps, smaller batches or fewer processes."
                )
            self._batches.append(before + count)
        return -(-self._batches[epoch] // self.batches_per_step)

    def __contains__(self, step: int) -> bool:
        epoch = 0
        while self.step(epoch) < step:
            epoch += 1
        return self.step(epoch) == step


def make_loader(
    accelerator: Accelerator,
    dataset: Dataset,
    collate: Callable[[list[Any]], dict[str, Any]],
    arguments: TrainingArguments,
    sampler: Sampler,
) -> DataLoader:
    """Endless loader of the training batches of this process; accelerate must not prepare it."""
    on_gpu = accelerator.device.type == "cuda"
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=(2 if on_gpu else 0)
        if arguments.dataloader_num_workers is None
        else arguments.dataloader_num_workers,
        pin_memory=on_gpu,
        # Otherwise a loader draws from the global random state, and a resumed run would differ.
        generator=torch.Generator(),
    )
