"""A half-step of the reversible iteration: one state is updated with f of the other.

    y' = (1 - beta) y + beta g(z)        g(z) = (1 - gamma) z + gamma f(z)

that is, y' = a y + b f(z) + c z. The coefficients are constant.
"""

import ctypes
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""The dtypes that f may read and return."""

LANES = 256
"""Norms are summed in chunks of some rows of LANES elements, in memory order: each lane adds its rows in order, and a
chunk has LANES partial sums. The order is the same in all backends, and a GPU needs no shared memory and no barrier."""


def rows_of(n: int) -> int:
    """The number of rows of a chunk, for n elements. Few elements have small chunks, or a GPU would be idle."""
    return 16 if n >= 2**20 else 4


def chunks_of(n: int) -> int:
    """The number of chunks of n elements."""
    return -(-n // (rows_of(n) * LANES))


@dataclass(frozen=True)
class Coefficients:
    """The coefficients of a step y' = a y + b f(z) + c z of a float64 state. With c = 0, as in the paper, z is not read.

    Args:
        a: The weight of the state itself, 1 - beta.
        b: The weight of f, beta gamma.
        c: The weight of the other state, beta (1 - gamma).

    Example:
        >>> revdeq.kernels.Coefficients.rounded(0.5, gamma=0.5)
        Coefficients(a=0.5, b=0.25, c=0.25)
    """

    a: float
    b: float
    c: float = 0.0

    @classmethod
    def rounded(cls, beta: float, gamma: float = 1.0) -> "Coefficients":
        """The coefficients of an iteration.

        b and c are rounded to float32, which makes their products with float32 numbers exact in float64.

        Args:
            beta: The relaxation.
            gamma: The damping of f.

        Returns:
            The coefficients.
        """
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


def layout(x: Tensor) -> tuple[int, ...]:
    """The strides of x, except for dimensions of size 1, whose strides have no meaning."""
    return tuple([stride for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1])


class Adjoints(NamedTuple):
    """The adjoint of a state, the vector-Jacobian product, the adjoint of the other state and the next seed, or None."""

    adjoint: Tensor | None = None
    vjp: Tensor | None = None
    other: Tensor | None = None
    seed: Tensor | None = None


class HalfStep:
    """The half-steps of one state, in place, with constant coefficients.

    Every backend has a subclass for each state, which computes what reference.py and reference_exact.py specify, in one
    pass over memory. `f_z` is f of the other state, `z` is what f read, which is used only if gamma is not 1, and `copy`
    receives what f reads next: the new state, in its own dtype. `copy` may be z.

    Tensors that are only read are copied if they do not have the memory layout of the state. The others must have it.

    Args:
        state: A dense tensor: float64, or the integers of the exact state.
        step: `Coefficients`, or for the exact state a `Radix`.

    Raises:
        TypeError: A tensor has another dtype than expected.
        ValueError: A tensor has another shape, device or memory layout than expected.

    Example:
        >>> HalfStep = revdeq.kernels.half_step_for(torch.device("cpu"))
        >>> y, copy = HalfStep(torch.zeros(4).double(), revdeq.kernels.Coefficients.rounded(0.5)), torch.empty(4)
        >>> y.relax(torch.ones(4), None, copy)
        >>> copy
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """

    dtype = torch.float64
    sums = torch.float64
    alarm: Tensor | None = None

    def __init__(self, state: Tensor, step: Any) -> None:
        if state.dtype is not self.dtype:
            raise TypeError(f"y is {state.dtype}: it must be {self.dtype}")
        if not (state.is_contiguous() or layout(state) == layout(torch.empty_like(state))) or state.is_neg():
            raise ValueError(f"y has strides {state.stride()} for shape {tuple(state.shape)}: it must be dense in memory")
        self.state, self.step, self.mixes = state, step, step.c != 0
        self._shape, self._stride, self._device = state.shape, state.stride(), state.device

    @classmethod
    def encoded(cls, x: Tensor, step: Any) -> Self:
        """The half-steps of a new state with the numbers of x."""
        return cls(x.to(torch.float64, copy=True), step)

    def decoded(self, dtype: torch.dtype, rows: Any = ...) -> Tensor:
        """The numbers of the state, or of some of its rows, as f reads them."""
        return self.state[rows].to(dtype, copy=True)

    def duplicate(self) -> Self:
        """Another object with a copy of the state, so that both can be stepped."""
        return type(self)(self.state.clone(), self.step)

    def relax(self, f_z: Tensor, z: Tensor | None, copy: Tensor) -> None:
        """The half-step."""
        self._relax(self._read("f_z", f_z), self._mixed(z, copy.dtype), self._written("copy", copy), None)

    def relax_norms(self, f_z: Tensor, z: Tensor | None, copy: Tensor) -> Tensor:
        """The half-step. Returns partial sums of the squared changes and of the squared new state, [2, chunks, LANES]."""
        partial = self.state.new_empty((2, chunks_of(self.state.numel()), LANES), dtype=self.sums)
        self._relax(self._read("f_z", f_z), self._mixed(z, copy.dtype), self._written("copy", copy), partial)
        return partial

    def invert(self, f_z: Tensor, z: Tensor | None, copy: Tensor) -> None:
        """The inverse of the half-step."""
        self._invert(self._read("f_z", f_z), self._mixed(z, copy.dtype), self._written("copy", copy), NO_ADJOINTS)

    def invert_adjoint(
        self,
        f_z: Tensor,
        z: Tensor | None,
        copy: Tensor,
        adjoint: Tensor,
        vjp: Tensor,
        other: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> None:
        """The inverse, and adjoint = a adjoint + b vjp + c other, which is copied to the seed, in the seed's dtype.

        The adjoints are float64 if f reads float64, and otherwise float32."""
        adjoints = self._adjoints(copy.dtype, adjoint, vjp, other, seed)
        self._invert(self._read("f_z", f_z), self._mixed(z, copy.dtype), self._written("copy", copy), adjoints)

    def invert_compare(
        self,
        f_z: Tensor,
        z: Tensor | None,
        initial: Tensor,
        floor: Tensor,
        adjoint: Tensor | None = None,
        vjp: Tensor | None = None,
        other: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> Tensor:
        """The last inverse, whose result is known: the state is not changed, but compared. Returns the bits of the
        largest errors, relative to the state or to `floor`, a float32 number: [chunks, LANES]."""
        adjoints = NO_ADJOINTS if adjoint is None else self._adjoints(initial.dtype, adjoint, vjp, other, seed)
        maxima = self.state.new_empty((chunks_of(self.state.numel()), LANES), dtype=torch.int32)
        initial, z = self._read("initial", initial), self._mixed(z, initial.dtype)
        self._compare(self._read("f_z", f_z), z, initial, adjoints, floor, maxima)
        return maxima

    def _read(self, name: str, x: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """x in the memory layout of the state: x itself, or a copy, at the cost of an additional pass over memory."""
        if x is None:
            raise TypeError(f"{name} is None: it must be a tensor of shape {tuple(self._shape)}")
        self._check(name, x, dtype)
        if x.stride() == self._stride and not x.is_neg() or (layout(x) == layout(self.state) and not x.is_neg()):
            return x
        return torch.empty_like(self.state, dtype=x.dtype).copy_(x)

    def _mixed(self, z: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        return self._read("z", z, dtype) if self.mixes else None

    def _written(self, name: str, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        self._check(name, x, dtype)
        if x.stride() != self._stride and layout(x) != layout(self.state):
            raise ValueError(f"{name} has strides {x.stride()}: it must have those of y, {self._stride}")
        return x

    def _check(self, name: str, x: Tensor, dtype: torch.dtype | None) -> None:
        if x.shape != self._shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: it must have that of y, {tuple(self._shape)}")
        if x.device != self._device:
            raise ValueError(f"{name} is on {x.device}: it must be on the device of y, {self._device}")
        if x.dtype is not dtype and (dtype is not None or x.dtype not in DTYPES):
            expected = "float32, float64, bfloat16 or float16" if dtype is None else str(dtype)
            raise TypeError(f"{name} is {x.dtype}: it must be {expected}")

    def _adjoints(
        self, dtype: torch.dtype, adjoint: Tensor, vjp: Tensor | None, other: Tensor | None, seed: Tensor | None
    ) -> Adjoints:
        return Adjoints(
            self._written("adjoint", adjoint, wide(dtype)),
            self._read("vjp", vjp, dtype),
            self._read("other", other, wide(dtype)) if self.mixes else None,
            None if seed is None else self._written("seed", seed),
        )

    def _relax(self, f_z: Tensor, z: Tensor | None, copy: Tensor, partial: Tensor | None) -> None:
        raise NotImplementedError

    def _invert(self, f_z: Tensor, z: Tensor | None, copy: Tensor, adjoints: Adjoints) -> None:
        raise NotImplementedError

    def _compare(
        self, f_z: Tensor, z: Tensor | None, initial: Tensor, adjoints: Adjoints, floor: Tensor, maxima: Tensor
    ) -> None:
        raise NotImplementedError


NO_ADJOINTS = Adjoints()
