"""The coefficients of the integer state: 1 - beta as a fraction."""

import functools
from dataclasses import dataclass
from fractions import Fraction

from .half_step import float32

LARGEST_DENOMINATOR = 64


@dataclass(frozen=True)
class Radix:
    """1 - beta = sign p / d in lowest terms, the number of fraction bits of the state, and gamma, a float32 number."""

    sign: int
    p: int
    d: int
    fraction_bits: int
    gamma: float = 1.0

    @classmethod
    def nearest(cls, beta: float, fraction_bits: int, gamma: float = 1.0) -> "Radix":
        """That with the closest fraction to 1 - beta, except 0, with a denominator of at most 64. It may be 1 / 1."""
        exact = 1 - Fraction(beta)
        a = exact.limit_denominator(LARGEST_DENOMINATOR) or Fraction(-1 if exact < 0 else 1, LARGEST_DENOMINATOR)
        return cls(-1 if a < 0 else 1, abs(a.numerator), a.denominator, fraction_bits, float32(gamma))

    @property
    def weight(self) -> int:
        """The numerator of beta, whose denominator is d."""
        return self.d - self.sign * self.p

    @property
    def beta(self) -> float:
        """The relaxation, after rounding."""
        return self.weight / self.d

    @property
    def a(self) -> float:
        """The weight of the state itself, 1 - beta."""
        return self.sign * self.p / self.d

    @property
    def b(self) -> float:
        """The weight of f."""
        return self.beta * self.gamma

    @property
    def c(self) -> float:
        """The weight of the other state."""
        return self.beta * (1 - self.gamma)

    @property
    def unit(self) -> float:
        """The value of the last bit of a number."""
        return 2.0**-self.fraction_bits

    @functools.cached_property
    def free_half_steps(self) -> int:
        """How many half-steps fit into a 32-bit remainder, whose bound each multiplies by d / p, rounded up."""
        bound, count = self.d, 0
        while bound <= 2**32:
            bound, count = -(-bound // self.p) * self.d, count + 1
        return count
