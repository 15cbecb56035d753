"""The coefficients of the integer state: 1 - beta as a fraction."""

import functools
from dataclasses import dataclass
from fractions import Fraction

from .half_step import float32

LARGEST_DENOMINATOR = 64
ROOM = 2**32
"""The bound of a remainder."""


@dataclass(frozen=True)
class Radix:
    """The coefficients of a step of the integer state.

    Args:
        sign: The sign of 1 - beta, 1 or -1.
        p: The numerator of |1 - beta|.
        d: Its denominator.
        fraction_bits: The number G of fraction bits of the state.
        gamma: The damping of f, a float32 number.

    Example:
        >>> radix = revdeq.kernels.Radix.nearest(0.8, fraction_bits=24)
        >>> radix.sign, radix.p, radix.d
        (1, 1, 5)
    """

    sign: int
    p: int
    d: int
    fraction_bits: int
    gamma: float = 1.0

    @classmethod
    def nearest(cls, beta: float, fraction_bits: int, gamma: float = 1.0) -> "Radix":
        """The coefficients with the closest fraction to 1 - beta, except 0, with a denominator of at most 64. It may be
        1 / 1.

        Args:
            beta: The relaxation.
            fraction_bits: The number of fraction bits of the state.
            gamma: The damping of f.

        Returns:
            The coefficients.
        """
        exact = 1 - Fraction(beta)
        a = exact.limit_denominator(LARGEST_DENOMINATOR) or Fraction(-1 if exact < 0 else 1, LARGEST_DENOMINATOR)
        rounded = float32(gamma)
        return cls(-1 if a < 0 else 1, abs(a.numerator), a.denominator, fraction_bits, rounded)

    @property
    def a(self) -> float:
        """The weight of the state itself, 1 - beta."""
        return self.sign * self.p / self.d

    @property
    def b(self) -> float:
        """The weight of f, beta gamma."""
        return self.beta * self.gamma

    @property
    def c(self) -> float:
        """The weight of the other state, beta (1 - gamma)."""
        return 0.0 if self.gamma == 1 else self.beta * (1 - self.gamma)  # read in every half-step

    @property
    def beta(self) -> float:
        """The relaxation, after rounding."""
        return self.weight / self.d

    @property
    def weight(self) -> int:
        """The numerator of beta, whose denominator is d."""
        return self.d - self.sign * self.p

    @property
    def unit(self) -> float:
        """The value of the last bit of a number."""
        return 2.0**-self.fraction_bits

    @functools.cached_property
    def free_half_steps(self) -> int:
        """How many half-steps fit into a 32-bit remainder, whose bound each multiplies by d / p, rounded up."""
        bound, count = self.d, 0
        while bound <= ROOM:
            bound, count = -(-bound // self.p) * self.d, count + 1
        return count
