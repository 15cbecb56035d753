"""per_example=True: each example of a batch stops by itself, and keeps its states from then on.

Half-steps move all examples. The rows of those that have stopped are put back afterwards, on the way back too, where
their adjoints wait until their own last half-step is inverted.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .adjoint import BackwardPass
from .evaluation import Evaluation
from .iteration import Iteration, relative_change
from .state import State


@contextlib.contextmanager
def resting(half_steps: Sequence[Any], rows: Tensor, copies: Sequence[Tensor]) -> Iterator[None]:
    """Whatever moves the states in this context, these rows are put back, and decoded into the copies."""
    states = [h.state[rows] for h in half_steps]
    yield
    for h, rest in zip(half_steps, states, strict=True):
        h.state[rows] = rest
    for h, copy in zip(half_steps, copies, strict=True):
        copy[rows] = h.decoded(copy.dtype, rows)


class BackwardByExample(BackwardPass):
    _iteration: "ByExample"

    def at_half_step(self, evaluation: Evaluation, grads: Sequence[Tensor | None]) -> State:
        begins, k = self._adjoints is None, evaluation.k
        seeds = super().at_half_step(evaluation, grads)
        rows = self._iteration.stopped_before(k)
        if begins and self._adjoints is not None:
            for x, seed in zip(self._adjoints[k % 2], seeds, strict=True):
                x[rows] *= self._waiting(k)
                seed[rows] = 0
        return seeds

    def _invert(self, k: int, outputs: State) -> None:
        with resting(self._half_steps[k % 2], self._iteration.stopped_before(k), self._read):
            super()._invert(k, outputs)

    def _undo(self, k: int, grads: Sequence[Tensor | None]) -> State:
        assert self._adjoints is not None
        rows, mine = self._iteration.stopped_before(k), self._adjoints[1 - k % 2]
        waiting = [x[rows] for x in mine]
        with resting(*(self._half_steps[k % 2], rows, self._read) if k > 1 else ([], rows, [])):
            seeds = super()._undo(k, grads)
        factor = self._precision.at(k - 1).b * self._waiting(k - 1)
        for x, seed, before, g in zip(mine, seeds, waiting, grads, strict=True):
            x[rows] = before if g is None else torch.add(before, g[rows], alpha=factor)
            seed.copy_(x)
            seed[self._iteration.stopped_before(k - 1)] = 0
        return seeds

    def _waiting(self, k: int) -> float:
        """The first addition to y's adjoint will multiply it by a, which did not move the example."""
        return 1 / self._precision.at(k).a if k % 2 == 0 else 1.0


class ByExample(Iteration):
    """ends: the number of half-steps of each example, on the host; the maximum while it moves."""

    Backward = BackwardByExample

    def __init__(self, f: Any, z0: State, y0: State, *others: Any) -> None:
        super().__init__(f, z0, y0, *others)
        if len({x.shape[:1] for x in z0}) > 1 or not z0[0].dim() or self.options.schedule:
            raise ValueError("per_example=True needs a batch, a first dimension of all tensors of z0, and no schedule")
        self.ends = torch.full(z0[0].shape[:1], 2 * self.options.max_steps, device="cpu")
        self._last = torch.zeros((2, len(self.ends)), dtype=torch.float64)

    def stopped_before(self, k: int) -> Tensor:
        """The examples that half-step k does not move."""
        return (self.ends <= k).nonzero()[:, 0].to(self.z0[0].device)

    def advance(self, k: int, read: Sequence[Tensor], outputs: Sequence[Tensor], norms: bool) -> State:
        half_steps, rows = self.half_steps[k % 2], self.stopped_before(k)
        before = [h.decoded(torch.float32) for h in half_steps] if norms else []
        copies: State = []
        with resting(half_steps, rows, copies):
            copies += super().advance(k, read, outputs, norms=False)
        if norms:
            after = [h.decoded(torch.float32) for h in half_steps]
            moved = [x - old for x, old in zip(after, before, strict=True)]
            self.norms = torch.stack([_squared_norms(moved), _squared_norms(after)])
        return copies

    def _is_close(self, tol: float) -> bool:
        norms = self._arrived_norms()
        moves = self.ends >= 2 * self.steps
        self.norms = self._last = torch.where(moves, norms, self._last)  # of the others, the last change counts
        self.ends[moves & (relative_change(self.norms) <= tol)] = 2 * self.steps
        return bool((self.ends <= 2 * self.steps).all())

    def steps_taken(self) -> Tensor:
        return self.ends.clamp(max=2 * self.steps).to(self.z0[0].device) // 2


def _squared_norms(state: State) -> Tensor:
    """Of each example, in float64."""
    return torch.stack([x.flatten(1).double().square().sum(1) if x.dim() > 1 else x.double().square() for x in state]).sum(0)
