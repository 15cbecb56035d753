"""The half-steps in plain PyTorch: the specification that every other backend meets bit for bit.

With a = 1 - beta, one half-step of the reversible iteration (equation 5 of the paper) and its inverse
(equation 6) are

    state' = a state + beta f          state = (state' - beta f) / a

in float64, each operation rounded once: no multiply-add is contracted. `copy` receives the new state in
the dtype that f reads; float64 reaches bfloat16 and float16 by way of float32, as `Tensor.to` does it.

On the way back an adjoint follows (Algorithm 1). It is kept multiplied by beta, so that its buffer is
the seed of the next vector-Jacobian product, and it is computed in its own precision:

    adjoint = a adjoint + beta vjp

The last inverse of all arrives at the initial state, which is known. There the result is not stored but
compared, and how far off it is tells whether the way back can be trusted.
"""

import torch
from torch import Tensor

LANES = 256
ROWS = 16
"""A norm is summed in chunks of ROWS rows of LANES elements, in the order of memory: each lane adds its
rows one after the other, and a chunk leaves LANES partial sums. No backend can reorder that, and a GPU
needs neither shared memory nor a barrier for it."""


def relaxed(state: Tensor, f: Tensor, beta: float) -> Tensor:
    return (1 - beta) * state + beta * f.double()


def relax(state: Tensor, f: Tensor, copy: Tensor, beta: float) -> None:
    state.copy_(relaxed(state, f, beta))
    copy.copy_(state)


def relax_norms(state: Tensor, f: Tensor, copy: Tensor, beta: float) -> Tensor:
    """`relax`, and the partial sums of the squared change and of the squared new state: [2, chunks, LANES]."""
    before = state.clone()
    relax(state, f, copy, beta)
    return torch.stack([lane_sums((state - before).square()), lane_sums(state.square())])


def invert(state: Tensor, f: Tensor, copy: Tensor, beta: float) -> None:
    state.copy_((state - beta * f.double()) / (1 - beta))
    copy.copy_(state)


def invert_adjoint(state: Tensor, f: Tensor, copy: Tensor, adjoint: Tensor, vjp: Tensor, beta: float) -> None:
    invert(state, f, copy, beta)
    adjoint.copy_((1 - beta) * adjoint + beta * vjp.to(adjoint.dtype))


def invert_compare(
    state: Tensor, f: Tensor, initial: Tensor, adjoint: Tensor | None, vjp: Tensor | None, beta: float
) -> Tensor:
    """The last inverse: the lanes' largest error of the reconstruction and largest state, as the bits of a
    float32, int32 of shape [2, chunks, LANES]. Bits are ordered like the numbers, and NaN is above them all.
    Updates the adjoint, if there is one, and leaves the state as it is."""
    error = (state - beta * f.double()) / (1 - beta) - initial.double()
    if adjoint is not None and vjp is not None:
        adjoint.copy_((1 - beta) * adjoint + beta * vjp.to(adjoint.dtype))
    return torch.stack([lane_maxima(error), lane_maxima(state)])


def lane_maxima(x: Tensor) -> Tensor:
    bits = x.float().abs().view(torch.int32)
    return _in_rows(bits).amax(1)


def chunk_count(x: Tensor) -> int:
    return -(-x.numel() // (ROWS * LANES))


def lane_sums(x: Tensor) -> Tensor:
    rows = _in_rows(x)
    total = rows[:, 0].clone()
    for row in range(1, ROWS):
        total += rows[:, row]
    return total


def _in_rows(x: Tensor) -> Tensor:
    """x in the order of its memory, filled up with zeros: [chunks, ROWS, LANES]."""
    flat, chunks = x.as_strided((x.numel(),), (1,)), chunk_count(x)
    return torch.nn.functional.pad(flat, (0, chunks * ROWS * LANES - flat.numel())).view(chunks, ROWS, LANES)


class HalfStep:
    """A state, its copy in the dtype that f reads, and beta: bound once, stepped many times.

    Every backend is a subclass of this class that runs the functions above in one pass over memory.
    """

    def __init__(self, state: Tensor, copy: Tensor, beta: float) -> None:
        self.state, self.copy, self.beta = state, copy, beta
        self._stride = state.stride()
        self._partial: Tensor | None = None
        self.spilled: list[Tensor] = []

    def relax(self, f: Tensor) -> None:
        relax(self.state, f, self.copy, self.beta)

    def relax_norms(self, f: Tensor) -> Tensor:
        return relax_norms(self.state, f, self.copy, self.beta)

    def invert(self, f: Tensor) -> None:
        invert(self.state, f, self.copy, self.beta)

    def invert_adjoint(self, f: Tensor, adjoint: Tensor, vjp: Tensor) -> None:
        invert_adjoint(self.state, f, self.copy, adjoint, vjp, self.beta)

    def invert_compare(self, f: Tensor, initial: Tensor, adjoint: Tensor | None, vjp: Tensor | None) -> Tensor:
        return invert_compare(self.state, f, initial, adjoint, vjp, self.beta)

    def in_order(self, x: Tensor) -> Tensor:
        """x with its elements in the same places as the state's: x itself, or, at the cost of one more
        pass over memory, a copy."""
        if x.stride() == self._stride and not x.is_neg():
            return x
        return torch.empty_like(self.state, dtype=x.dtype).copy_(x)

    def partial_sums(self) -> Tensor:
        """The memory that `relax_norms` writes to and returns: the next call writes to it again."""
        if self._partial is None:
            self._partial = self.state.new_empty((2, chunk_count(self.state), LANES))
        return self._partial

    def partial_maxima(self) -> Tensor:
        return self.state.new_empty((2, chunk_count(self.state), LANES), dtype=torch.int32)
