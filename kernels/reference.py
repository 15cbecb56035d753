"""The half-steps in plain PyTorch: the specification that every other backend meets bit for bit.

One half-step of the reversible iteration (equation 5 of the paper, with a second coefficient) and its inverse
(equation 6) are, with z the copy of the other state that f read,

    t = b f + c z        state' = a state + t        state = (state' - t) / a

in float64, each operation rounded once: no multiply-add is contracted. Where c = 0, t = b f. `copy` receives the
new state in the dtype that f reads; float64 reaches bfloat16 and float16 by way of float32, as `Tensor.to` does it.

On the way back an adjoint follows (Algorithm 1). It is kept multiplied by b, so that its buffer is the seed of the
next vector-Jacobian product, and it is computed in its own precision, from left to right:

    adjoint = a adjoint + b vjp + c other

where `other` is the adjoint of the other state, which the product was seeded with. Where f returns another dtype than
the adjoint's, `seed` receives the adjoint in that dtype, rounded as the copy is.

Where examples take different numbers of half-steps, those that do not take part in one rest: see `HalfStep.each`.

The last inverse of all arrives at the initial state, which is known. There the result is not stored but
compared, and how far off it is tells whether the way back can be trusted.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from . import half_step
from .half_step import LANES, Adjoints, Coefficients, Linear, chunk_count


def relaxed(state: Tensor, f: Tensor, read: Tensor | None, step: Coefficients) -> Tensor:
    return step.a * state + _moved_by(f, read, step)


class Taking(NamedTuple):
    """Which examples take part, as tensors that are broadcast to the state: in this half-step, in the one after it and
    in the one before, and by what an adjoint is multiplied where it rests."""

    moves: Tensor
    moves_after: Tensor
    moved_before: Tensor
    kept: float

    @property
    def examples(self) -> int:
        return len(self.moves)


def taking(h: half_step.HalfStep) -> Taking | None:
    """What `each` says of a half-step."""
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
    a = state.new_full((), step.a)  # by a plain number, torch does not divide on GPUs: it multiplies by the reciprocal
    return (state - _moved_by(f, read, step)) / a


def invert(state: Tensor, f: Tensor, copy: Tensor, step: Coefficients, each: Taking | None = None) -> None:
    """The copy holds what f read, until it receives the state."""
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
    """If there is one."""
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
    """Each element's error relative to its state, or to `floor` where the state is smaller, in float32: the lanes'
    largest, as bits, int32 of shape [chunks, LANES]. Bits are ordered like the numbers, and NaN is above them all."""
    ratio = error.float().abs() / torch.maximum(state.float().abs(), floor)
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
    """x in the order of its memory, each example filled up with zeros: [chunks, ROWS, LANES]."""
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
        """The lanes' largest relative error of the reconstruction, see `lane_ratios`. Updates the adjoint, if there is
        one, and leaves the state and its copy as they are."""
        update_adjoint(*adjoints, adjoint_step)
        return lane_ratios(previous(self.state, f, self.copy, step) - initial.double(), self.state, floor)
