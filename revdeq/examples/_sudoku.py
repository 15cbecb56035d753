"""Sudokus of 4 x 4 cells, for `recursive`."""

import itertools

import torch
from torch import Tensor

CLUES = 8
"""The number of cells, of 16, that are given."""
PLACES = torch.tensor([(i // 4, 4 + i % 4, 8 + i // 8 * 2 + i % 4 // 2) for i in range(16)])
"""The row, the column and the box of every cell: 12 groups."""


def grids() -> Tensor:
    """All 288 solutions."""
    rows = torch.tensor(list(itertools.permutations(range(1, 5))))
    found = rows[torch.cartesian_prod(*[torch.arange(24)] * 4)].flatten(1)
    for group in range(4, 12):
        cells = found[:, PLACES.eq(group).any(1).nonzero().flatten().tolist()]
        found = found[(cells.sort().values == torch.arange(1, 5)).all(1)]
    return found


def puzzles(count: int, solutions: Tensor) -> tuple[Tensor, Tensor]:
    """Clues (0 is an empty cell) that only one solution fits, and that solution."""
    answers = solutions[torch.randint(len(solutions), (4 * count,))]
    given = torch.rand(answers.shape).argsort(1) < CLUES
    fitting = ((solutions == answers.unsqueeze(1)) | ~given.unsqueeze(1)).all(2).sum(1)
    unique = (fitting == 1).nonzero().flatten()[:count]
    return (answers * given)[unique], answers[unique]
