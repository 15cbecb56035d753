"""What numpy lacks: a fused multiply-add, bfloat16, and conversions to integers that saturate."""

import math
from fractions import Fraction

import numpy as np


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a b + c, rounded once."""
    if a.dtype == np.float32:  # the product is exact in float64
        return _sum_rounded_to_odd(a.astype(np.float64) * b, c.astype(np.float64)).astype(np.float32)
    return np.array([_fma(*x) for x in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)], np.float64)


def _sum_rounded_to_odd(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x + y with the last bit set if it is not exact, so that rounding it to float32 is as good as rounding once."""
    total = x + y
    part = total - x
    error = (x - (total - part)) + (y - part)
    bits = total.view(np.int64)
    even = (error != 0) & (bits & 1 == 0) & np.isfinite(total)
    towards_error = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(even, bits + towards_error, bits).view(np.float64)


def _fma(a: float, b: float, c: float) -> float:
    if not all(map(math.isfinite, (a, b, c))):
        return c if math.isfinite(a) and math.isfinite(b) else a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:  # the product underflows to a zero of its sign
        return a * b + c if a == 0 or b == 0 else 0.0
    try:
        size = abs(exact.numerator) / exact.denominator  # rounded to the nearest even
    except OverflowError:
        size = math.inf
    return size if exact > 0 else -size


def bfloat16_to_float32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Round to the nearest even; NaN becomes 0x7FFF, as in PTX."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def to_integer(x: np.ndarray, dtype: type) -> np.ndarray:
    """Round towards zero and saturate. NaN becomes 0, or 2^63 if the source or the target has 64 bits."""
    limits = np.iinfo(dtype)
    wide = x.itemsize == 8 or limits.bits == 64
    nan = (1 << limits.bits - 1) if wide else 0
    numbers = [nan if v != v else _clamp(v, limits) for v in x.tolist()]
    return np.array([v & (1 << limits.bits) - 1 for v in numbers], f"u{limits.bits // 8}").view(dtype)


def _clamp(x: float, limits: np.iinfo) -> int:
    if math.isinf(x):
        return limits.max if x > 0 else limits.min
    return min(max(int(x), limits.min), limits.max)
