# SPDX-License-Identifier: Apache-2.0
"""Which prompts a rollout takes, as pure functions of the seed and the number of the rollout."""

import logging
import math
from collections.abc import Hashable, Sequence

import numpy as np

from omnitrl.errors import InputError


logger = logging.getLogger(__name__)


class PromptStream:
    """
    An endless row of shuffled passes over the prompts, cut into rollouts.

    ```
    pass      0 0 0 0 0 0 0 1 1 1 1 1 1 1 2 2 …    7 prompts, every pass in an order of its own
    rollout   0 0 0 1 1 1 2 2 2 3 3 3 4 4 4 5 …    3 prompts a rollout; the third spans two passes
    ```

    Nothing is dropped at the end of a pass, so every prompt is seen equally often whatever the sizes. There is no
    state: a run that is resumed at rollout `k` asks for rollout `k`, and all ranks get the same answer.

    Args:
        num_prompts (`int`):
            Number of rows of the dataset.
        prompts_per_rollout (`int`):
            Number of prompts that one rollout takes. With more than `num_prompts`, or where a rollout spans two
            passes, a prompt can come twice in one rollout, as two groups.
        seed (`int`):
            Seed of the permutations, at least 0.
        shuffle (`bool`, *optional*, defaults to `True`):
            Whether a pass is shuffled; `False` keeps the order of the dataset.
        name (`str`, *optional*, defaults to `"the dataset"`):
            What has these prompts, for a warning that they are few.

    Raises:
        [`~omnitrl.errors.InputError`]: if one of the numbers is out of range.

    Example:

    ```python
    >>> from omnitrl.data import PromptStream
    >>> stream = PromptStream(num_prompts=4, prompts_per_rollout=3, seed=0, shuffle=False)
    >>> stream.indices(0), stream.indices(1)
    ([0, 1, 2], [3, 0, 1])
    ```
    """

    def __init__(
        self, num_prompts: int, prompts_per_rollout: int, seed: int, shuffle: bool = True, name: str = "the dataset"
    ) -> None:
        if num_prompts < 1:
            raise InputError(f"A prompt stream needs at least 1 prompt, got {num_prompts}.")
        if prompts_per_rollout < 1:
            raise InputError(f"A rollout needs at least 1 prompt, got prompts_per_rollout={prompts_per_rollout}.")
        if seed < 0:
            raise InputError(f"The seed of the prompts must be at least 0, got {seed}: use 42.")
        if prompts_per_rollout > num_prompts:
            logger.warning(
                "A rollout takes %d prompts but %s has %d, so that a rollout holds some prompts more than once, each "
                "time as a group of its own.",
                prompts_per_rollout,
                name,
                num_prompts,
            )
        self.num_prompts = num_prompts
        self.prompts_per_rollout = prompts_per_rollout
        self.seed = seed
        self.shuffle = shuffle
        self._last_pass = (-1, np.empty(0, dtype=np.int64))

    @property
    def rollouts_per_epoch(self) -> int:
        """Number of rollouts after which every prompt has been seen at least once."""
        return math.ceil(self.num_prompts / self.prompts_per_rollout)

    def indices(self, rollout: int) -> list[int]:
        """
        Lists the dataset rows of a rollout.

        Args:
            rollout (`int`):
                Number of the rollout, from 0.

        Returns:
            `list[int]`: `prompts_per_rollout` row numbers.
        """
        if rollout < 0:
            raise InputError(f"Rollouts are numbered from 0, got {rollout}.")
        start = rollout * self.prompts_per_rollout
        stop = start + self.prompts_per_rollout
        first_pass, last_pass = start // self.num_prompts, (stop - 1) // self.num_prompts
        rows = np.concatenate([self._permutation(number) for number in range(first_pass, last_pass + 1)])
        offset = first_pass * self.num_prompts
        return [int(row) for row in rows[start - offset : stop - offset]]

    def _permutation(self, number: int) -> np.ndarray:
        """The order of the prompts in one pass, `(num_prompts,)`. The last one is kept: a pass has many rollouts."""
        if not self.shuffle:
            return np.arange(self.num_prompts)
        if self._last_pass[0] != number:
            # RandomState and SeedSequence are the two whose streams numpy promises never to change (NEP 19), so that
            # a run can be repeated years later.
            words = np.random.SeedSequence((self.seed, number)).generate_state(8)
            self._last_pass = (number, np.random.RandomState(words).permutation(self.num_prompts))
        return self._last_pass[1]


class BucketStream:
    """
    A [`PromptStream`] for the rows of each size; they take turns, so that all samples of a rollout have one size.

    ```
    rows      6 wide, 3 tall
    rollout   wide tall wide | wide wide tall | …    each cycle in an order of its own, 2 : 1 as the rows are
    ```

    Turns are as many as rows and evenly spread, so every prompt is seen equally often, whatever its size, and at any
    time no size is more than a rollout ahead or behind. There is no state, as in [`PromptStream`], and for rows of one
    size the rollouts are those of a [`PromptStream`].

    Args:
        sizes (`Sequence[Hashable]`):
            The size of each row of the dataset, or whatever else rows of a rollout must have in common.
        prompts_per_rollout (`int`):
            Number of prompts that one rollout takes.
        seed (`int`):
            Seed of the turns and of the permutations, at least 0.
        shuffle (`bool`, *optional*, defaults to `True`):
            Whether passes and turns are shuffled.

    Raises:
        [`~omnitrl.errors.InputError`]: if there are no rows, or one of the numbers is out of range.

    Example:

    ```python
    >>> from omnitrl.data import BucketStream
    >>> stream = BucketStream(["wide", "tall", "wide"], prompts_per_rollout=1, seed=0, shuffle=False)
    >>> [(stream.size(rollout), stream.indices(rollout)) for rollout in range(3)]
    [('wide', [0]), ('tall', [1]), ('wide', [2])]
    ```
    """

    def __init__(self, sizes: Sequence[Hashable], prompts_per_rollout: int, seed: int, shuffle: bool = True) -> None:
        rows: dict[Hashable, list[int]] = {}
        for number, size in enumerate(sizes):
            rows.setdefault(size, []).append(number)
        if len(rows) <= 1:
            streams = [PromptStream(len(sizes), prompts_per_rollout, seed, shuffle)]
        else:
            streams = [
                PromptStream(len(numbers), prompts_per_rollout, _seed_of(seed, i), shuffle, f"the size {size}")
                for i, (size, numbers) in enumerate(rows.items())
            ]
        self.sizes = list(rows)
        self.num_prompts = len(sizes)
        self.prompts_per_rollout = prompts_per_rollout
        self.seed = seed
        self.shuffle = shuffle
        self._rows, self._streams = list(rows.values()), streams
        counts = [len(numbers) for numbers in self._rows]
        self._turns = [count // math.gcd(*counts) for count in counts]
        self._last_cycle = (-1, np.empty(0, dtype=np.int64))

    @property
    def rollouts_per_epoch(self) -> int:
        """Number of rollouts that take as many prompts as there are."""
        return math.ceil(self.num_prompts / self.prompts_per_rollout)

    def size(self, rollout: int) -> Hashable:
        """Size of the rows of a rollout."""
        return self.sizes[self._turn(rollout)[0]]

    def indices(self, rollout: int) -> list[int]:
        """
        Lists the dataset rows of a rollout.

        Args:
            rollout (`int`):
                Number of the rollout, from 0.

        Returns:
            `list[int]`: `prompts_per_rollout` row numbers.
        """
        bucket, turn = self._turn(rollout)
        rows = self._rows[bucket]
        return [rows[place] for place in self._streams[bucket].indices(turn)]

    def others(self, rollout: int) -> list[int]:
        """All rows of a rollout's size, in the order of the dataset."""
        return self._rows[self._turn(rollout)[0]]

    def _turn(self, rollout: int) -> tuple[int, int]:
        """Whose turn a rollout is, and how many turns it had before."""
        if len(self._rows) == 1:
            return 0, rollout
        if rollout < 0:
            raise InputError(f"Rollouts are numbered from 0, got {rollout}.")
        cycle, place = divmod(rollout, sum(self._turns))
        order = self._order(cycle)
        bucket = int(order[place])
        return bucket, cycle * self._turns[bucket] + int(np.count_nonzero(order[:place] == bucket))

    def _order(self, cycle: int) -> np.ndarray:
        """Buckets in the order of their turns: those of each are evenly spread, from a random start."""
        if self._last_cycle[0] != cycle:
            starts = np.full(len(self._turns), 0.5)
            if self.shuffle:
                words = np.random.SeedSequence((self.seed, cycle, 1)).generate_state(8)
                starts = np.random.RandomState(words).random_sample(len(self._turns))
            times = [(np.arange(turns) + start) / turns for turns, start in zip(self._turns, starts, strict=True)]
            buckets = np.repeat(np.arange(len(self._turns)), self._turns)
            self._last_cycle = (cycle, buckets[np.argsort(np.concatenate(times), kind="stable")])
        return self._last_cycle[1]


def _seed_of(seed: int, bucket: int) -> int:
    """A seed for the permutations of a bucket, so that buckets of as many rows are not shuffled alike."""
    if seed < 0:
        return seed  # refused by the stream
    return int(np.random.SeedSequence((seed, bucket, 2)).generate_state(1)[0])


def shard(num_items: int, rank: int, world_size: int) -> range:
    """
    Gives a rank its share of a list: contiguous, in order, sizes differing by at most one.

    Args:
        num_items (`int`):
            Length of the list. It may be smaller than `world_size`; some shares are empty then.
        rank (`int`):
            Number of the rank, from 0.
        world_size (`int`):
            Number of ranks.

    Returns:
        `range`: the positions of this rank. Those of all ranks, one after the other, are `range(num_items)`.

    Example:

    ```python
    >>> from omnitrl.data import shard
    >>> [list(shard(5, rank, 2)) for rank in range(2)]
    [[0, 1], [2, 3, 4]]
    ```
    """
    if not 0 <= rank < world_size:
        raise InputError(f"rank must be at least 0 and less than world_size={world_size}, got {rank}.")
    return range(num_items * rank // world_size, num_items * (rank + 1) // world_size)
