"""The exact state, for loops of your own. It is an object because it keeps the remainders of its divisions."""

from typing import Any

import torch
from torch import Tensor

from .backends import backend_for
from .checks import check_kinds, check_memory, check_tensor, coefficients, inputs, read_next
from .half_step import DTYPES
from .radix import Radix


class ExactState:
    """A state of integers, whose half-steps are inverted to the last bit, for any beta and any number of steps.

    Its methods take and return what the operators `relax`, `invert` and `invert_adjoint` do. 1 - beta is rounded to a
    fraction.

    Args:
        y: The initial values, in any floating dtype and layout. They are copied.
        beta: The relaxation.
        gamma: The damping of f.
        fraction_bits: The number of bits after the point, 1 to 40. Magnitudes must stay below 2^(31 - fraction_bits).

    Raises:
        TypeError: An argument is of the wrong kind or dtype.
        ValueError: An argument has a wrong shape, device or value, or there is no half-step left to invert.

    Example:
        >>> y = revdeq.kernels.ExactState(torch.zeros(2), beta=0.75)
        >>> y.relax(torch.ones(2))
        tensor([0.7500, 0.7500])
        >>> y.invert(torch.ones(2))
        tensor([0., 0.])
    """

    def __init__(self, y: Tensor, beta: float, gamma: float = 1.0, fraction_bits: int = 24) -> None:
        check_kinds(beta, gamma, None, y=y)
        coefficients(beta, gamma)
        if type(fraction_bits) is not int or not 1 <= fraction_bits <= 40:
            raise ValueError(f"fraction_bits = {fraction_bits!r} must be an integer from 1 to 40")
        radix = Radix.nearest(beta, fraction_bits, gamma)
        if radix.p >= radix.d:
            raise ValueError(f"beta = {beta}: 1 - beta must be close to a fraction other than 0 and 1 with d <= 64")
        check_tensor("y", y, y, *DTYPES)
        check_memory(y, {})
        states: Any = backend_for(y.device).states
        self._gamma, self._half_step = gamma, states["exact"].encoded(y, radix)

    def read(self, dtype: torch.dtype) -> Tensor:
        """The numbers of the state, as f reads them."""
        return self._half_step.decoded(dtype)

    @property
    def overflowed(self) -> bool:
        """Whether f or the state was too large, and the state is meaningless. Asking waits for the device."""
        return bool(self._half_step.alarm.any())

    def relax(self, f_z: Tensor, z: Tensor | None = None, *, dtype: Any = None) -> Tensor:
        """A half-step. Returns what f reads next."""
        read = self._next(False, dtype, f_z=f_z, z=z)
        self._half_step.relax(f_z, z, read)
        return read

    def invert(self, f_z: Tensor, z: Tensor | None = None, *, dtype: Any = None) -> Tensor:
        """The inverse of the last half-step. Returns what f reads next."""
        read = self._next(True, dtype, f_z=f_z, z=z)
        self._half_step.invert(f_z, z, read)
        return read

    def invert_adjoint(
        self, f_z: Tensor, adjoint: Tensor, vjp: Tensor, z: Any = None, other: Any = None, *, dtype: Any = None
    ) -> tuple[Tensor, Tensor]:
        """The inverse, and a half-step of the adjoint. Returns what f reads next and the next seed."""
        read = self._next(True, dtype, f_z=f_z, z=z, adjoint=adjoint, vjp=vjp, other=other)
        seed = torch.empty_like(read, dtype=f_z.dtype)
        self._half_step.invert_adjoint(f_z, z, read, adjoint, vjp, other, seed)
        return read, seed

    def _next(self, back: bool, dtype: Any, **tensors: Any) -> Tensor:
        """An empty tensor for what f reads next. Raises if the arguments do not fit the state."""
        check_kinds(0.5, self._gamma, dtype, **tensors)
        if back and not self._half_step.done:
            raise ValueError("every half-step that was taken is inverted")
        state, used = self._half_step.state, inputs(self._gamma, **tensors)
        read = read_next(state, dtype, used)
        check_memory(state, used)
        return read
