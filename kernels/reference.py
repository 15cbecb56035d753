"""The specification: the reversible iteration, its inverse and its gradient, as loops of the operators. Below them are
the half-steps in plain PyTorch, which every other backend computes bit for bit.

    t = b f(z) + c z        y' = a y + t        y = (y' - t) / a        adjoint' = a adjoint + b vjp + c other

Here a = 1 - beta, b = beta gamma and c = beta (1 - gamma), which is 0 in the paper. z is what f read of the other
state, and `other` is the adjoint of y. Each operation rounds once: no multiply-add is contracted, and where c = 0,
nothing is added. States are float64. Adjoints have their own precision. They are stored times b, so that each is the
seed of the next vector-Jacobian product.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from . import half_step
from .half_step import LANES, Adjoints, Coefficients, Compared, chunks_of, rows_of

Function: TypeAlias = Callable[[Tensor], Tensor]
operators = torch.ops.revdeq  # those of operators.py


@torch.no_grad()
def iterate(f: Function, z0: Tensor, beta: float, steps: int) -> tuple[Tensor, Tensor]:
    """Equation 5: from y = z = z0, y <- (1 - beta) y + beta f(z) and z <- (1 - beta) z + beta f(y). Returns y and z."""
    y, z, read = z0.to(torch.float64, copy=True), z0.to(torch.float64, copy=True), z0
    for _ in range(steps):
        for state in (y, z):
            read = operators.relax(state, f(read), beta)
    return y, z


@torch.no_grad()
def invert(f: Function, y: Tensor, z: Tensor, beta: float, steps: int, dtype: torch.dtype) -> None:
    """Equation 6: z <- (z - beta f(y)) / (1 - beta) and y <- (y - beta f(z)) / (1 - beta). f reads `dtype`."""
    read = y.to(dtype)
    for _ in range(steps):
        for state in (z, y):
            read = operators.invert(state, f(read), beta)


@torch.no_grad()
def gradient(f: Function, y: Tensor, z: Tensor, grad: Tensor, beta: float, steps: int) -> Tensor:
    """Algorithm 1: the gradient with respect to z0, from `grad`, that with respect to z after the last step. y and z
    become z0 again. Parameters of f accumulate their gradients."""
    read, seed, y_bar, z_bar = y.to(grad.dtype), beta * grad, torch.zeros_like(grad), beta * grad
    for _ in range(steps):
        for state, adjoint in ((z, y_bar), (y, z_bar)):
            f_read, vjp = evaluate(f, read, seed)
            read, seed = operators.invert_adjoint(state, f_read, adjoint, vjp, beta)
    return (z_bar + (1 - beta) * y_bar) / beta


@torch.enable_grad()
def evaluate(f: Function, read: Tensor, seed: Tensor) -> tuple[Tensor, Any]:
    """f, and the product of the seed with f's derivative."""
    output = f(read.requires_grad_())
    output.backward(seed)
    return output.detach(), read.grad


def relaxed(y: Tensor, f_z: Tensor, z: Tensor | None, step: Coefficients) -> Tensor:
    """y' = a y + t"""
    return step.a * y + _moved_by(f_z, z, step)


def inverted(y: Tensor, f_z: Tensor, z: Tensor | None, step: Coefficients) -> Tensor:
    """y = (y' - t) / a"""
    a = y.new_full((), step.a)  # on GPUs, torch multiplies by the reciprocal of a Python number
    return (y - _moved_by(f_z, z, step)) / a


def _moved_by(f_z: Tensor, z: Tensor | None, step: Coefficients) -> Tensor:
    """t = b f(z) + c z"""
    moved = step.b * f_z.double()
    return moved + step.c * z.double() if step.c and z is not None else moved


def update(adjoints: Adjoints, step: Any) -> None:
    """adjoint = a adjoint + b vjp + c other, if there is an adjoint, and its copy, the seed."""
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


def lane_maxima(error: Tensor, y: Tensor, floor: Tensor, maxima: Tensor) -> None:
    """Writes the largest relative error of each lane of each chunk in float32, as bits. An error is relative to the
    state, or to `floor` if the state is smaller. Bits are ordered like the numbers, and NaN is the largest."""
    ratio = (error.float() / torch.maximum(y.float().abs(), floor)).abs()  # the NaN of inf / inf has a sign
    maxima.copy_(_in_rows(ratio.view(torch.int32)).amax(1))


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

    def _invert(self, f_z: Tensor, z: Tensor | None, copy: Tensor, adjoints: Adjoints, compared: Compared) -> None:
        before = inverted(self.state, f_z, z, self.step)
        update(adjoints, self.step)
        if compared:
            lane_maxima(before - copy.double(), self.state, *compared)
        else:
            self.state.copy_(before)
            copy.copy_(before)
