"""per_example=True: each example of a batch stops by itself, and keeps its states from then on.

Half-steps move all examples. The rows of those that have stopped are put back afterwards, on the way back too, where
their adjoints wait until their own last half-step is inverted.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .adjoint import BackwardPass, Gradients
from .iteration import Iteration, relative_change
from .state import State


@contextlib.contextmanager
def resting(half_steps: Sequence[Any], rows: Tensor) -> Iterator[None]:
    """Whatever moves the states in this context, these rows are put back."""
    states = [h.state[rows] for h in half_steps]
    yield
    for h, rest in zip(half_steps, states, strict=True):
        h.state[rows] = rest


def show(half_steps: Sequence[Any], copies: Sequence[Tensor], rows: Tensor) -> None:
    """Copy these rows of the states to what f reads."""
    if len(rows):
        for h, copy in zip(half_steps, copies, strict=True):
            copy[rows] = h.decoded(copy.dtype, rows)


class BackwardByExample(BackwardPass):
    def __init__(self, iteration: "ByExample", *others: Any) -> None:
        super().__init__(iteration, *others)
        self._stopped_before = iteration.stopped_before

    def _add(self, k: int, grads: Gradients) -> State:
        rows, kept = self._stopped_before(k), self._read[0].new_ones(())
        if k % 2 == 0:  # the next addition to y's adjoint multiplies it by a, which did not move these examples
            kept = kept / self._step.a
        grads = [None if g is None else g.index_put((rows,), g[rows] * kept.to(g.dtype)) for g in grads]
        seeds = super()._add(k, grads)
        for seed in seeds:
            seed[rows] = 0
        return seeds

    def _invert(self, k: int, outputs: State) -> None:
        rows = self._stopped_before(k)
        with resting(self._half_steps[k % 2], rows):
            super()._invert(k, outputs)
        show(self._half_steps[k % 2], self._read, rows)

    def _undo(self, k: int, products: State) -> State:
        assert self.adjoints is not None
        rows, mine = self._stopped_before(k), self.adjoints[1 - k % 2]
        waiting, read = [x[rows] for x in mine], self._read
        with resting(self._half_steps[k % 2] if k > 1 else [], rows):
            seeds = super()._undo(k, products)
        if k > 1:
            show(self._half_steps[k % 2], read, rows)
        factor = self._step.b / (self._step.a if (k - 1) % 2 == 0 else 1)
        for x, seed, before, g in zip(mine, seeds, waiting, products, strict=True):
            x[rows] = torch.add(before, g[rows], alpha=factor)
            seed.copy_(x)
            seed[self._stopped_before(k - 1)] = 0
        return seeds


class ByExample(Iteration):
    """ends: the number of half-steps of each example, on the host; the maximum while it moves."""

    Backward: Any = BackwardByExample

    def __init__(self, f: Any, z0: State, *others: Any) -> None:
        super().__init__(f, z0, *others)
        if len({x.shape[:1] for x in z0}) > 1 or not z0[0].dim():
            raise ValueError("per_example=True needs a batch: a first dimension that all tensors of z0 share")
        self.ends = torch.full(z0[0].shape[:1], 2 * self.options.max_steps, device="cpu")
        self._last = torch.zeros((2, len(self.ends)), dtype=torch.float64)

    def stopped_before(self, k: int) -> Tensor:
        """The examples that half-step k does not move."""
        return (self.ends <= k).nonzero()[:, 0].to(self.z0[0].device)

    def advance(self, k: int, read: Sequence[Tensor], outputs: Sequence[Tensor], norms: bool) -> State:
        if not self.half_steps:
            self._begin(outputs)
        half_steps, rows = self.half_steps[k % 2], self.stopped_before(k)
        before = [h.decoded(torch.float64) for h in half_steps] if norms else []
        with resting(half_steps, rows):
            copies = super().advance(k, read, outputs, norms=False)
        show(half_steps, copies, rows)
        if norms:
            after = [h.decoded(torch.float64) for h in half_steps]
            moved = [x - old for x, old in zip(after, before, strict=True)]
            self.norms = torch.stack([_squared_norms(moved), _squared_norms(after)])
        return copies

    def _is_close(self, tol: float) -> Tensor:
        norms = self._arrived_norms()
        moves = self.ends >= 2 * self.steps
        self.norms = self._last = torch.where(moves, norms, self._last)  # of the others, the last change counts
        converged = relative_change(self.norms) <= tol
        self.ends[moves & converged] = 2 * self.steps
        return converged

    def _has_arrived(self) -> bool:
        return self.steps > 0 and bool((self.ends <= 2 * self.steps).all())

    def steps_taken(self) -> Tensor:
        return self.ends.clamp(max=2 * self.steps).to(self.z0[0].device) // 2


def _squared_norms(state: State) -> Tensor:
    """Of each example, in float64."""
    return torch.stack([x.unsqueeze(-1).flatten(1).square().sum(1) for x in state]).sum(0)
