"""Windows of T tokens out of one stream of tokens: an endless shuffled iterator for training, one pass for evaluation.

Window i holds tokens iT … (i+1)T: T inputs, and the T targets one place further. Neighbours share one token, as target
of the first and input of the second, so a pass predicts every token but the first of the stream exactly once.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

IGNORE_INDEX = -100

Batch = tuple[Tensor, Tensor]


class PackedBatches:
    """Endless training batches (inputs, targets), both [B, T] int64 on the CPU. Targets are the next tokens.

    Each epoch is a permutation of the floor((n - 1) / T) whole windows, drawn from (seed, epoch) alone: the same on
    every machine. A batch runs on over the end of an epoch. With `world` processes the global batch is world · B
    windows and process `rank` gets its B of them; the global order does not depend on `world`.

    Raises:
        ValueError: the stream is shorter than one window, or a number is out of range.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        *,
        seq_len: int,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        rank: int = 0,
        world: int = 1,
    ):
        check_shape(seq_len, batch_size, rank, world)
        check_seed(seed)
        check_length(tokens, seq_len)
        self.tokens, self.seq_len, self.batch_size = tokens, seq_len, batch_size
        self.seed, self.shuffle, self.rank, self.world = seed, shuffle, rank, world
        self.windows = (len(tokens) - 1) // seq_len
        self.position = 0  # windows that all processes together have been given
        self.order_of: tuple[int, np.ndarray] | None = None  # (epoch, its permutation)

    def __iter__(self) -> "PackedBatches":
        return self

    def __next__(self) -> Batch:
        first = self.position + self.rank * self.batch_size
        windows = [self.window_at(place) for place in range(first, first + self.batch_size)]
        self.position += self.world * self.batch_size
        starts = np.array(windows, dtype=np.int64) * self.seq_len
        rows = torch.from_numpy(self.tokens[starts[:, None] + np.arange(self.seq_len + 1)].astype(np.int64))
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def window_at(self, place: int) -> int:
        epoch, index = divmod(place, self.windows)
        if not self.shuffle:
            return index
        if self.order_of is None or self.order_of[0] != epoch:
            # RandomState's streams are frozen (NEP 19), those of Generator and of torch may change with a version.
            self.order_of = epoch, np.random.RandomState([self.seed, epoch]).permutation(self.windows)
        return int(self.order_of[1][index])

    def state_dict(self) -> dict[str, int]:
        """The exact position, and what it is a position in. Batch size and world may differ when it is loaded."""
        return {"position": self.position, **self.identity()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after the last batch before `state_dict()` was called.

        Raises:
            ValueError: the state is a position in other data, other windows or another order.
        """
        for name, here in self.identity().items():
            if int(state[name]) != here:
                raise ValueError(
                    f"the checkpoint's data position has {name} = {int(state[name])}, this run has {here}: "
                    "resume with the same data, seq_len and seed, or start a new run"
                )
        self.position = int(state["position"])

    def identity(self) -> dict[str, int]:
        return {"tokens": len(self.tokens), "seq_len": self.seq_len, "seed": self.seed, "shuffle": int(self.shuffle)}


def evaluation_batches(
    tokens: np.ndarray, *, seq_len: int, batch_size: int, max_tokens: int | None = None, rank: int = 0, world: int = 1
) -> Iterator[Batch]:
    """One pass in order: (inputs, targets), both [B, T] int64, that predict each of the first `max_tokens` tokens once.

    The last window and the last batch are filled up with input 0 and target -100 (ignored), so that every batch has the
    same shape. Processes take turns by batches and get equally many: with world > 1 a batch may have no target at all,
    so add up losses (reduction "sum") and divide once.

    Raises:
        ValueError: there is no token to predict, or a number is out of range.
    """
    check_shape(seq_len, batch_size, rank, world)
    if len(tokens) < 2:
        raise ValueError(f"the validation set has {len(tokens)} tokens, and the first predicts nothing: give more text")
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens}: give 1 or more validation tokens, or none for all")
    predicted = len(tokens) - 1 if max_tokens is None else min(max_tokens, len(tokens) - 1)
    return _evaluation_batches(tokens, predicted, seq_len, batch_size, rank, world)


def _evaluation_batches(
    tokens, predicted: int, seq_len: int, batch_size: int, rank: int, world: int
) -> Iterator[Batch]:
    step = batch_size * seq_len
    for first in range(0, predicted, world * step):
        start = first + rank * step
        count = max(0, min(step, predicted - start))
        inputs, targets = torch.zeros(step, dtype=torch.int64), torch.full((step,), IGNORE_INDEX)
        if count:
            part = torch.from_numpy(tokens[start : start + count + 1].astype(np.int64))
            inputs[:count], targets[:count] = part[:-1], part[1:]
        yield inputs.view(batch_size, seq_len), targets.view(batch_size, seq_len)


def check_length(tokens: np.ndarray, seq_len: int) -> None:
    if len(tokens) < seq_len + 1:
        raise ValueError(
            f"seq_len={seq_len} is longer than the corpus: one window needs {seq_len + 1} tokens, the training set has "
            f"{len(tokens)}; lower train.seq_len or give more text"
        )


def check_seed(seed: int) -> None:
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed}: give a number from 0 to {2**32 - 1}")


def check_token_ids(tokens: np.ndarray, vocab_size: int, what: str) -> None:
    """Raise ValueError if a token id is no class of a model with `vocab_size` = V classes."""
    highest = int(tokens.max())
    if highest >= vocab_size:
        raise ValueError(
            f"{what} holds the token id {highest}, but the model's vocabulary V is {vocab_size}: "
            f"set vocab_size={highest + 1} or more, or tokenize with a smaller vocabulary"
        )


def check_shape(seq_len: int, batch_size: int, rank: int, world: int) -> None:
    for name, value in (("seq_len", seq_len), ("batch_size", batch_size), ("world", world)):
        if value < 1:
            raise ValueError(f"{name}={value}: give 1 or more")
    if not 0 <= rank < world:
        raise ValueError(f"rank={rank} is outside 0 … world - 1 = {world - 1}")
