"""A half-step of the reversible iteration: one state is updated with f of the other.

    y' = (1 - beta) y + beta g(z)        g(z) = (1 - gamma) z + gamma f(z)

that is, y' = a y + b f(z) + c z.
"""

import ctypes
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from typing_extensions import Self

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""The dtypes that f may read and return."""

LANES = 256
"""Norms are summed in chunks of some rows of LANES elements, in memory order. Each lane adds its rows in order, so that
the bits are the same in all backends, and a GPU needs no shared memory and no barrier."""

MANY = 2**20
"""Fewer elements have small chunks, or multiprocessors would be idle: an H100 has 132."""


def rows_of(n: int) -> int:
    """The number of rows of a chunk, for n elements."""
    return 16 if n >= MANY else 4


def chunks_of(n: int) -> int:
    """The number of chunks of n elements."""
    return -(-n // (rows_of(n) * LANES))


@dataclass(frozen=True)
class Coefficients:
    """The coefficients of a half-step of a float64 state. With c = 0, as in the paper, z is not read."""

    a: float
    b: float
    c: float = 0.0

    @classmethod
    def rounded(cls, beta: float, gamma: float = 1.0) -> "Coefficients":
        """b and c are rounded to float32, so that their products with float32 numbers are exact in float64."""
        b, c = float32(beta * gamma), float32(beta * (1 - gamma))
        return cls(1 - (b + c), b, c)

    @property
    def beta(self) -> float:
        """The relaxation, after rounding."""
        return self.b + self.c

    @property
    def gamma(self) -> float:
        """The damping of f, after rounding."""
        return self.b / self.beta


def float32(x: float) -> float:
    """Round to float32."""
    return ctypes.c_float(x).value


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of adjoints, where f reads this dtype."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def same_layout(x: Tensor, y: Tensor) -> bool:
    """Whether x has the strides of y, except in dimensions of size 1, whose strides have no meaning."""
    strides = zip(x.stride(), y.stride(), x.shape, strict=True)
    return x.stride() == y.stride() or all(mine == other for mine, other, size in strides if size != 1)


Adjoints: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""The adjoint of a state, the vector-Jacobian product, the adjoint of the other state and the next seed, or None."""
NO_ADJOINTS: Adjoints = (None, None, None, None)

Compared: TypeAlias = tuple[Tensor, Tensor] | None
"""What a comparison with the initial state needs: the floor, and a tensor for the largest error of each lane."""


class HalfStep:
    """The half-steps of one state, in place, with constant coefficients.

    Every backend has a subclass for each state, which computes what reference.py and reference_exact.py specify, in one
    pass over memory. `f_z` is f of the other state, and `z` is what f read, which is used only if gamma is not 1.
    `copy` receives what f reads next: the new state, in the dtype of the copy. It may be z.

    The adjoints are float64 if f reads float64, and otherwise float32; z, the vector-Jacobian product and the initial
    state have the copy's dtype. All tensors have the shape and the device of the state, which is dense, and those that
    are written have its memory layout, too. None of this is checked here: operators.py checks it.

    state: float64, or the integers of the exact state. step: `Coefficients`, or for the exact state a `Radix`.
    """

    sums = torch.float64
    alarm: Tensor | None = None

    def __init__(self, state: Tensor, step: Any) -> None:
        self.state, self.step, self._stride, self._mixes = state, step, state.stride(), step.c != 0

    @classmethod
    def encoded(cls, x: Tensor, step: Any) -> Self:
        """The half-steps of a new state with the numbers of x."""
        return cls(x.to(torch.float64, copy=True), step)

    def decoded(self, dtype: torch.dtype, rows: Tensor | None = None) -> Tensor:
        """The numbers of the state, or of some of its rows, as f reads them."""
        return (self.state if rows is None else self.state[rows]).to(dtype, copy=True)

    def duplicate(self) -> Self:
        """Another object with a copy of the state, so that both can be stepped."""
        return type(self)(self.state.clone(), self.step)

    def relax(self, f_z: Tensor, z: Tensor | None, copy: Tensor) -> None:
        """The half-step."""
        self._relax(self.in_order(f_z), self.in_order(z) if self._mixes else None, copy, None)

    def relax_norms(self, f_z: Tensor, z: Tensor | None, copy: Tensor) -> Tensor:
        """The half-step. Returns partial sums of the squared changes and of the squared new state, of the shape
        [2, chunks, LANES]."""
        partial = self.state.new_empty((2, chunks_of(self.state.numel()), LANES), dtype=self.sums)
        self._relax(self.in_order(f_z), self.in_order(z) if self._mixes else None, copy, partial)
        return partial

    def invert(self, f_z: Tensor, z: Tensor | None, copy: Tensor) -> None:
        """The inverse of the half-step."""
        self._invert(self.in_order(f_z), self.in_order(z) if self._mixes else None, copy, NO_ADJOINTS, None)

    def invert_adjoint(self, f_z: Tensor, z: Tensor | None, copy: Tensor, *adjoints: Any) -> None:
        """The inverse, and adjoint = a adjoint + b vjp + c other, which is copied to the seed, in the seed's dtype.
        `adjoints` are adjoint, vjp, other and seed, of which the last two may be None or left out."""
        z = self.in_order(z) if self._mixes else None
        self._invert(self.in_order(f_z), z, copy, self._adjoints(*adjoints), None)

    def invert_compare(self, f_z: Tensor, z: Tensor | None, initial: Tensor, floor: Tensor, *adjoints: Any) -> Tensor:
        """The last inverse, whose result is known: the state is not changed, but compared. The adjoints, if there are
        any, are updated. Returns the bits of the largest errors, relative to the state or to `floor`, a float32 number,
        of the shape [chunks, LANES]."""
        maxima = self.state.new_empty((chunks_of(self.state.numel()), LANES), dtype=torch.int32)
        z, updated = self.in_order(z) if self._mixes else None, self._adjoints(*adjoints) if adjoints else NO_ADJOINTS
        self._invert(self.in_order(f_z), z, self.in_order(initial), updated, (floor, maxima))
        return maxima

    def in_order(self, x: Any) -> Any:
        """x in the memory layout of the state: x itself, or a copy, at the cost of an additional pass over memory."""
        if (x.stride() == self._stride or same_layout(x, self.state)) and not x.is_neg():
            return x
        return torch.empty_like(self.state, dtype=x.dtype).copy_(x)

    def _adjoints(self, adjoint: Tensor, vjp: Tensor, other: Tensor | None = None, seed: Any = None) -> Adjoints:
        return adjoint, self.in_order(vjp), self.in_order(other) if self._mixes else None, seed

    def _relax(self, f_z: Tensor, z: Tensor | None, copy: Tensor, partial: Tensor | None) -> None:
        raise NotImplementedError

    def _invert(self, f_z: Tensor, z: Tensor | None, copy: Tensor, adjoints: Adjoints, compared: Compared) -> None:
        """With `compared`, nothing is written but the adjoints and the errors, and the initial state is in the place of
        the copy."""
        raise NotImplementedError
