"""The half-steps in plain PyTorch: the specification that every other backend meets bit for bit.

One half-step of the reversible iteration (equation 5 of the paper, with a second coefficient) and its inverse
(equation 6) are, with z the copy of the other state that f read,

    t = b f + c z        state' = a state + t        state = (state' - t) / a

in float64, each operation rounded once: no multiply-add is contracted. Where c = 0, t = b f. `copy` receives the
new state in the dtype that f reads; like `Tensor.to`, this rounds to float32 before bfloat16 or float16.

The backward pass also updates an adjoint (Algorithm 1). It is stored multiplied by b, like the seed of the next
vector-Jacobian product, and it is computed in its own precision, from left to right:

    adjoint = a adjoint + b vjp + c other

where `other` is the adjoint of the other state. `seed`, if it is given, receives the adjoint in its own dtype, rounded
like the copy.

If examples take different numbers of half-steps, those that have ended are frozen: see `HalfStep.each`.

The last inverse should give the initial state, which is known. Its result is not stored but compared: the error tells
whether the reconstruction can be trusted.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from . import half_step
from .half_step import LANES, Adjoints, Coefficients, Linear, chunk_count


def relaxed(state: Tensor, f: Tensor, read: Tensor | None, step: Coefficients) -> Tensor:
    return step.a * state + _moved_by(f, read, step)


class Taking(NamedTuple):
    """Which examples are moved by this half-step, by the next one and by the one before, as tensors that can be
    broadcast to the state; and the factor for the adjoints of frozen examples."""

    moves: Tensor
    moves_after: Tensor
    moved_before: Tensor
    kept: float

    @property
    def examples(self) -> int:
        return len(self.moves)


def taking(h: half_step.HalfStep) -> Taking | None:
    """The masks of a half-step, or None without `each`."""
    if h.ends is None:
        return None
    left = (h.ends - h.now).view(-1, *[1] * (h.state.dim() - 1))
    return Taking(left > 0, left > 1, left >= 0, h.kept)


def relax(
    state: Tensor, f: Tensor, read: Tensor | None, copy: Tensor, step: Coefficients, each: Taking | None = None
) -> None:
    after = relaxed(state, f, read, step)
    state.copy_(after if each is None else torch.where(each.moves, after, state))
    copy.copy_(state)


def relax_norms(
    state: Tensor, f: Tensor, read: Tensor | None, copy: Tensor, step: Coefficients, each: Taking | None = None
) -> Tensor:
    """`relax`, and the partial sums of the squared change and of the squared new state: [2, chunks, LANES]."""
    before = state.clone()
    relax(state, f, read, copy, step, each)
    return torch.stack([lane_sums((state - before).square(), each), lane_sums(state.square(), each)])


def previous(state: Tensor, f: Tensor, read: Tensor, step: Coefficients) -> Tensor:
    a = state.new_full((), step.a)  # on GPUs, torch multiplies by the reciprocal of a Python number
    return (state - _moved_by(f, read, step)) / a


def invert(state: Tensor, f: Tensor, copy: Tensor, step: Coefficients, each: Taking | None = None) -> None:
    """The copy holds what f read, until it is overwritten with the state."""
    before = previous(state, f, copy, step)
    state.copy_(before if each is None else torch.where(each.moves, before, state))
    copy.copy_(state)


def update_adjoint(
    adjoint: Tensor | None,
    vjp: Tensor | None,
    other: Tensor | None,
    seed: Tensor | None,
    step: Linear,
    each: Taking | None = None,
) -> None:
    """Does nothing without an adjoint."""
    if adjoint is None or vjp is None:
        return
    old = step.a * adjoint
    if each is not None:
        old = torch.where(each.moves_after, old, each.kept * adjoint)
    total = old + step.b * vjp.to(adjoint.dtype)
    if step.c and other is not None:
        mixed = total + step.c * other
        total = mixed if each is None else torch.where(each.moves, mixed, total)
    adjoint.copy_(total)
    if seed is not None:
        seed.copy_(total if each is None else torch.where(each.moved_before, total, 0))


def lane_ratios(error: Tensor, state: Tensor, floor: Tensor) -> Tensor:
    """The largest relative error of each lane in float32, as bits: int32 of shape [chunks, LANES]. An error is relative
    to the state, or to `floor` if the state is smaller. Bits are ordered like the numbers, and NaN is the largest."""
    ratio = (error.float() / torch.maximum(state.float().abs(), floor)).abs()  # the NaN of inf / inf has a sign
    return _in_rows(ratio.view(torch.int32)).amax(1)


def lane_sums(x: Tensor, each: Taking | None = None) -> Tensor:
    rows = _in_rows(x) if each is None else _in_rows(torch.where(each.moves, x, 0), each.examples)
    total = rows[:, 0].clone()
    for row in range(1, half_step.ROWS):
        total += rows[:, row]
    return total


def _moved_by(f: Tensor, read: Tensor | None, step: Coefficients) -> Tensor:
    moved = step.b * f.double()
    return moved + step.c * read.double() if step.c and read is not None else moved


def _in_rows(x: Tensor, examples: int = 1) -> Tensor:
    """x in memory order, each example padded with zeros: [chunks, ROWS, LANES]."""
    length, chunks = x.numel() // max(examples, 1), chunk_count(x, examples)
    missing = chunks * half_step.ROWS * LANES // max(examples, 1) - length
    flat = x.as_strided((examples, length), (length, 1))
    return torch.nn.functional.pad(flat, (0, missing)).view(chunks, half_step.ROWS, LANES)


class HalfStep(half_step.HalfStep):
    def _relax(self, f: Tensor, read: Tensor | None, step: Coefficients) -> None:
        relax(self.state, f, read, self.copy, step, taking(self))

    def _relax_norms(self, f: Tensor, read: Tensor | None, step: Coefficients) -> Tensor:
        return relax_norms(self.state, f, read, self.copy, step, taking(self))

    def _invert(self, f: Tensor, adjoints: Adjoints, step: Coefficients, adjoint_step: Linear) -> None:
        each = taking(self)
        invert(self.state, f, self.copy, step, each)
        update_adjoint(*adjoints, adjoint_step, each)

    def _compare(
        self, f: Tensor, initial: Tensor, floor: Tensor, adjoints: Adjoints, step: Coefficients, adjoint_step: Linear
    ) -> Tensor:
        """The largest relative reconstruction error of each lane, see `lane_ratios`. Updates the adjoint, if there is
        one, but neither the state nor its copy."""
        update_adjoint(*adjoints, adjoint_step)
        error = previous(self.state, f, self.copy, step) - initial.double()
        return self.partial_maxima().copy_(lane_ratios(error, self.state, floor))
