"""The half-steps in plain PyTorch: the specification that every other backend meets bit for bit.

One half-step of the reversible iteration (equation 5 of the paper, with a second coefficient) and its inverse
(equation 6) are, with z the copy of the other state that f read,

    t = b f(z) + c z        y' = a y + t        y = (y' - t) / a

in float64, each operation rounded once: no multiply-add is contracted. Where c = 0, t = b f(z). `copy` receives the
new state in the dtype that f reads; like `Tensor.to`, this rounds to float32 before bfloat16 or float16.

The backward pass also updates an adjoint (Algorithm 1). It is stored multiplied by b, like the seed of the next
vector-Jacobian product, and it is computed in its own precision, from left to right:

    adjoint = a adjoint + b vjp + c other

where `other` is the adjoint of the other state. `seed`, if it is given, receives the adjoint in its own dtype, rounded
like the copy.

The last inverse should give the initial state, which is known. Its result is not stored but compared: the error tells
whether the reconstruction can be trusted.
"""

from typing import Any

import torch
from torch import Tensor

from . import half_step
from .half_step import LANES, Adjoints, Coefficients, chunks_of, rows_of


def relaxed(y: Tensor, f_z: Tensor, z: Tensor | None, step: Coefficients) -> Tensor:
    return step.a * y + _moved_by(f_z, z, step)


def inverted(y: Tensor, f_z: Tensor, z: Tensor | None, step: Coefficients) -> Tensor:
    a = y.new_full((), step.a)  # on GPUs, torch multiplies by the reciprocal of a Python number
    return (y - _moved_by(f_z, z, step)) / a


def _moved_by(f_z: Tensor, z: Tensor | None, step: Coefficients) -> Tensor:
    moved = step.b * f_z.double()
    return moved + step.c * z.double() if step.c and z is not None else moved


def update(adjoints: Adjoints, step: Any) -> None:
    """Does nothing without an adjoint."""
    adjoint, vjp, other, seed = adjoints
    if adjoint is None or vjp is None:
        return
    total = step.a * adjoint + step.b * vjp.to(adjoint.dtype)
    adjoint.copy_(total if other is None else total + step.c * other)
    if seed is not None:
        seed.copy_(adjoint)


def lane_sums(x: Tensor) -> Tensor:
    """Each lane's sum over the rows of a chunk, in their order: [chunks, LANES]."""
    rows = _in_rows(x)
    total = rows[:, 0].clone()
    for row in rows.unbind(1)[1:]:
        total += row
    return total


def lane_maxima(error: Tensor, y: Tensor, floor: Tensor) -> Tensor:
    """The largest relative error of each lane in float32, as bits: int32 of shape [chunks, LANES]. An error is relative
    to the state, or to `floor` if the state is smaller. Bits are ordered like the numbers, and NaN is the largest."""
    ratio = (error.float() / torch.maximum(y.float().abs(), floor)).abs()  # the NaN of inf / inf has a sign
    return _in_rows(ratio.view(torch.int32)).amax(1)


def _in_rows(x: Tensor) -> Tensor:
    """x in memory order, padded with zeros: [chunks, rows, LANES]."""
    n = x.numel()
    rows, chunks = rows_of(n), chunks_of(n)
    flat = x.as_strided((n,), (1,))
    return torch.nn.functional.pad(flat, (0, chunks * rows * LANES - n)).view(chunks, rows, LANES)


class HalfStep(half_step.HalfStep):
    def _relax(self, f_z: Tensor, z: Tensor | None, copy: Tensor, partial: Tensor | None) -> None:
        after = relaxed(self.state, f_z, z, self.step)
        if partial is not None:
            partial[0] = lane_sums((after - self.state).square())
            partial[1] = lane_sums(after.square())
        self.state.copy_(after)
        copy.copy_(after)

    def _invert(self, f_z: Tensor, z: Tensor | None, copy: Tensor, adjoints: Adjoints) -> None:
        self.state.copy_(inverted(self.state, f_z, z, self.step))
        copy.copy_(self.state)
        update(adjoints, self.step)

    def _compare(
        self, f_z: Tensor, z: Tensor | None, initial: Tensor, adjoints: Adjoints, floor: Tensor, maxima: Tensor
    ) -> None:
        error = inverted(self.state, f_z, z, self.step) - initial.double()
        maxima.copy_(lane_maxima(error, self.state, floor))
        update(adjoints, self.step)
