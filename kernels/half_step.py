"""The interface of half-steps, for all states and backends.

A half-step of the reversible iteration updates one state with f of the other:

    y' = (1 - beta) y + beta g(z)        g(z) = (1 - gamma) z + gamma f(z)

that is, y' = a y + b f(z) + c z, with three coefficients, which are arguments of the step.
"""

import ctypes
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""The dtypes that f may read and return."""

LANES = 256
ROWS = 16
"""Norms are summed in chunks of ROWS rows of LANES elements, in memory order: each lane adds its rows in order, and a
chunk has LANES partial sums. The order is the same in all backends, and a GPU needs no shared memory and no barrier."""


class Linear(Protocol):
    """The coefficients of y' = a y + b f(z) + c z, for the adjoint."""

    @property
    def a(self) -> float: ...

    @property
    def b(self) -> float: ...

    @property
    def c(self) -> float: ...


@dataclass(frozen=True)
class Coefficients:
    """The coefficients of a step y' = a y + b f(z) + c z of a float64 state. With c = 0, as in the
    paper, z is not read.

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


def chunk_count(x: Tensor, examples: int = 1) -> int:
    """The number of chunks of a tensor with this many consecutive examples. No chunk spans two examples."""
    return examples * -(-x.numel() // (max(examples, 1) * ROWS * LANES))


def layout(x: Tensor) -> tuple[int, ...]:
    """The strides of x, except for dimensions of size 1, whose strides have no meaning."""
    return tuple([stride for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1])


def in_order(x: Tensor, like: Tensor) -> Tensor:
    """x with the memory layout of `like`: x itself, or a copy, at the cost of an additional pass over memory."""
    if layout(x) == layout(like) and not x.is_neg():
        return x
    return torch.empty_like(like, dtype=x.dtype).copy_(x)


Adjoints: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""The adjoint of a state, the vector-Jacobian product, the other adjoint and the seed; all None without an adjoint."""
NO_ADJOINT: Adjoints = (None, None, None, None)


class HalfStep:
    """A state and its copy in the dtype of f's input: bound once, stepped many times.

    Every backend has a subclass for each state, with the five operations that reference.py and reference_exact.py
    specify, each in one pass over memory:

        relax(f, read, step)            the half-step; `read` is what f read, the copy of the other state
        relax_norms(f, read, step)      the same, with the partial sums of squares
        invert(f, step)                 its inverse; the copy holds what f read, and receives what it will read next
        invert_adjoint(f, adjoint, vjp, other, step, adjoint_step, seed)
                                        the same, with adjoint = a adjoint + b vjp + c other; `seed`, which has the
                                        layout of the state, receives a copy of the adjoint in its own dtype
        invert_compare(f, initial, floor, adjoint, vjp, other, step, adjoint_step, seed)
                                        the last inverse, compared with the initial state instead of stored

    `read` and `other` are used only if c is not 0. Pass the same `step` and `adjoint_step` objects in every call: a
    backend may cache what it derives from them.

    With `each`, the examples of a batch take different numbers of half-steps.

    The methods here convert their tensors to the memory layout of the state and drop those that are not used. A backend
    implements `_relax`, `_relax_norms`, `_invert` and `_compare`.
    """

    ends: Tensor | None = None
    examples: int = 1
    now: int = 0
    kept: float = 1.0

    def __init__(self, state: Tensor, copy: Tensor) -> None:
        self.state, self.copy = state, copy
        self._stride = state.stride()
        self._partial: Tensor | None = None
        self.spilled: list[Tensor] = []

    def write_to(self, copy: Tensor) -> None:
        """Replace the copy by another tensor with the same layout."""
        self.copy = copy

    def each(self, ends: Tensor, now: int, kept: float = 1.0) -> None:
        """Set the next operation to half-step `now`, counted from 0 over both states. Example i takes the first
        `ends[i]` half-steps, an even number, in int32. Examples are the first dimension, outermost in memory.

        An example that has ended is frozen: its state does not change and is written to the copy, and its sums are 0.
        In the backward pass, the adjoint of state `now` - 1 is multiplied by a if half-step `now` + 1 moved the
        example, and otherwise by `kept`. `other` is added only if half-step `now` moved it. The seed, which must be
        given, is 0 if half-step `now` - 1 did not. `invert_compare` is for the first two half-steps, which move all
        examples, and takes no adjoint."""
        self.ends, self.examples, self.now, self.kept = ends, len(ends), now, kept

    def of(self, state: Tensor, copy: Tensor) -> "HalfStep":
        """The same for other examples: it continues from here, and cannot invert the half-steps before."""
        return type(self)(state, copy)

    def in_order(self, x: Tensor) -> Tensor:
        """x with the memory layout of the state."""
        return x if x.stride() == self._stride and not x.is_neg() else in_order(x, self.state)

    sums: torch.dtype = torch.float64

    def partial_sums(self) -> Tensor:
        """The buffer that `relax_norms` fills and returns. The next call overwrites it."""
        if self._partial is None:
            chunks = chunk_count(self.state, self.examples)
            self._partial = self.state.new_empty((2, chunks, LANES), dtype=self.sums)
        return self._partial

    maxima: Tensor | None = None

    def partial_maxima(self, examples: int = 1) -> Tensor:
        """The memory that `invert_compare` writes to and returns: `maxima`, if that is given."""
        if self.maxima is not None:
            return self.maxima
        return self.state.new_empty((chunk_count(self.state, examples), LANES), dtype=torch.int32)

    def relax(self, f: Tensor, read: Tensor | None, step: Any) -> None:
        self._relax(self.in_order(f), self.in_order(read) if step.c and read is not None else None, step)

    def relax_norms(self, f: Tensor, read: Tensor | None, step: Any) -> Tensor:
        return self._relax_norms(self.in_order(f), self.in_order(read) if step.c and read is not None else None, step)

    def invert(self, f: Tensor, step: Any) -> None:
        self._invert(self.in_order(f), NO_ADJOINT, step, step)

    def invert_adjoint(
        self,
        f: Tensor,
        adjoint: Tensor,
        vjp: Tensor,
        other: Tensor | None,
        step: Any,
        adjoint_step: Linear,
        seed: Tensor | None = None,
    ) -> None:
        adjoints = adjoint, self.in_order(vjp), other if adjoint_step.c else None, seed
        self._invert(self.in_order(f), adjoints, step, adjoint_step)

    def invert_compare(
        self,
        f: Tensor,
        initial: Tensor,
        floor: Tensor,
        adjoint: Tensor | None,
        vjp: Tensor | None,
        other: Tensor | None,
        step: Any,
        adjoint_step: Linear,
        seed: Tensor | None = None,
    ) -> Tensor:
        adjoints = NO_ADJOINT
        if adjoint is not None and vjp is not None:
            adjoints = adjoint, self.in_order(vjp), other if adjoint_step.c else None, seed
        return self._compare(self.in_order(f), self.in_order(initial), floor, adjoints, step, adjoint_step)

    def _relax(self, f: Tensor, read: Tensor | None, step: Any) -> None:
        raise NotImplementedError

    def _relax_norms(self, f: Tensor, read: Tensor | None, step: Any) -> Tensor:
        raise NotImplementedError

    def _invert(self, f: Tensor, adjoints: Adjoints, step: Any, adjoint_step: Linear) -> None:
        raise NotImplementedError

    def _compare(
        self, f: Tensor, initial: Tensor, floor: Tensor, adjoints: Adjoints, step: Any, adjoint_step: Linear
    ) -> Tensor:
        raise NotImplementedError
