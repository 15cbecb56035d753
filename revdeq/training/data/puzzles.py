"""Puzzles that take the longer to solve the larger they are, made on the fly.

A model that is trained on small ones can be evaluated on larger ones: `--set bits=64` or `--set cells=12`.
"""

import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .dataset import SOLVED, Batch
from .files import DataError

EPOCH = 10_000
"""Puzzles that are called an epoch: there is no end to them."""

EVALUATED = {"valid": 500, "test": 500}
"""Puzzles in a split."""


class Puzzles:
    """What the puzzles have in common. A puzzle is solved when every position of it is right."""

    metric = SOLVED
    splits: tuple[str, ...] = ("valid", "test")
    validation = "valid"
    size = EPOCH
    unit: str
    units: int
    features: int
    dimensions: int
    device = torch.device("cpu")

    def describe(self) -> str:
        raise NotImplementedError

    def made(self, count: int, generator: torch.Generator, training: bool = False) -> tuple[Tensor, Tensor]:
        """Inputs (count, features, positions ...) and targets (count, positions ...)."""
        raise NotImplementedError

    @property
    def shapes(self) -> dict[str, Any]:
        return {"features": self.features, "dimensions": self.dimensions}

    def to(self, device: torch.device) -> "Puzzles":
        self.device = device
        return self

    def order(self, generator: torch.Generator) -> Tensor:
        return torch.arange(self.size)

    def batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        return self._batch(len(indices), generator, training=True)

    def _batch(self, count: int, generator: torch.Generator, training: bool) -> Batch:
        inputs, targets = self.made(count, generator, training)
        return Batch(inputs.to(self.device), targets.to(self.device))

    def evaluation(self, split: str, batch: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(self.splits.index(split))
        left = EVALUATED[split]
        while left:
            count = min(batch, left)
            yield self._batch(count, generator, training=False)
            left -= count

    def saved(self) -> None:
        return None


class PrefixSums(Puzzles):
    """Strings of random bits; the parity of the bits so far is to be found at every position.

    Args:
        bits: The length of a string.

    Example:
        >>> puzzles = revdeq.training.data.PrefixSums(bits=8)
        >>> puzzles.batch(torch.arange(2), torch.Generator()).inputs.shape
        torch.Size([2, 1, 8])
    """

    unit, features, dimensions = "bits", 1, 1

    def __init__(self, bits: int = 16) -> None:
        self.bits = self.units = checked("bits", bits)

    def describe(self) -> str:
        return f"prefix sums modulo 2 of {self.bits} bits, made on the fly"

    def made(self, count: int, generator: torch.Generator, training: bool = False) -> tuple[Tensor, Tensor]:
        bits = torch.randint(2, (count, self.bits), generator=generator)
        return bits[:, None].float(), bits.cumsum(1) % 2


class Mazes(Puzzles):
    """Random perfect mazes; the path between two of their cells is to be found.

    A maze of k x k cells is an image of (2 k + 1) x (2 k + 1), with channels for what is not wall, for the start and
    for the end. It is carved by a depth-first search in random order, which makes long corridors.

    Args:
        cells: k.
        longest_of: In training, the longest path of so many random ones is taken: in small mazes long paths are rare,
            and a model that has hardly seen any does not carry far. In evaluations, a random one.

    Example:
        >>> puzzles = revdeq.training.data.Mazes(cells=4)
        >>> puzzles.batch(torch.arange(2), torch.Generator()).inputs.shape
        torch.Size([2, 3, 9, 9])
    """

    unit, features, dimensions = "pixels", 3, 2

    def __init__(self, cells: int = 4, longest_of: int = 1) -> None:
        self.cells, self.longest_of = checked("cells", cells), checked("longest_of", longest_of, least=1)
        self.units = (2 * cells + 1) ** 2

    def describe(self) -> str:
        return f"mazes of {self.cells} x {self.cells} cells, made on the fly"

    def made(self, count: int, generator: torch.Generator, training: bool = False) -> tuple[Tensor, Tensor]:
        draw, tries = random.Random(int(torch.randint(2**62, (), generator=generator))), self.longest_of
        free = torch.tensor([carved(self.cells, draw) for _ in range(count)], dtype=torch.float32)
        if not training:
            tries = 1
        free = free.repeat_interleave(tries, 0)
        ends = torch.zeros(count * tries, 2, *free.shape[1:])
        for maze in range(count * tries):
            for channel, cell in enumerate(draw.sample(range(self.cells**2), 2)):
                ends[maze, channel, 2 * (cell // self.cells) + 1, 2 * (cell % self.cells) + 1] = 1
        targets = path(free, ends.sum(1)).long()
        longest = targets.sum((1, 2)).view(count, tries).argmax(1) + tries * torch.arange(count)
        return torch.cat([free[:, None], ends], 1)[longest], targets[longest]


def carved(cells: int, draw: random.Random) -> list[list[int]]:
    """Rows of 1 where a maze is free, and of 0 where it has walls."""
    image = [[0] * (2 * cells + 1) for _ in range(2 * cells + 1)]
    way = [(draw.randrange(cells), draw.randrange(cells))]
    image[2 * way[0][0] + 1][2 * way[0][1] + 1] = 1
    while way:
        row, column = way[-1]
        unseen = [
            (r, c)
            for r, c in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1))
            if 0 <= r < cells and 0 <= c < cells and not image[2 * r + 1][2 * c + 1]
        ]
        if not unseen:
            way.pop()
            continue
        r, c = draw.choice(unseen)
        image[row + r + 1][column + c + 1] = image[2 * r + 1][2 * c + 1] = 1
        way.append((r, c))
    return image


def path(free: Tensor, ends: Tensor) -> Tensor:
    """What is left when dead ends, but for the two ends, are filled until there are none."""
    left = free.clone()
    while True:
        padded = F.pad(left, (1, 1, 1, 1))
        neighbours = padded[:, :-2, 1:-1] + padded[:, 2:, 1:-1] + padded[:, 1:-1, :-2] + padded[:, 1:-1, 2:]
        dead = (left > 0) & (ends == 0) & (neighbours <= 1)
        if not dead.any():
            return left
        left[dead] = 0


def checked(name: str, value: Any, least: int = 2) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise DataError(f"{name}={value!r}: it must be an integer of at least {least}")
    return value
