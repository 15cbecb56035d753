"""What numpy lacks: a fused multiply-add, bfloat16, and conversions to integers that saturate."""

import math
from fractions import Fraction

import numpy as np


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a b + c, rounded once."""
    if a.dtype == np.float32:  # the product is exact in float64
        return _sum_rounded_to_odd(a.astype(np.float64) * b, c.astype(np.float64)).astype(np.float32)
    # Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", with the product scaled to about 1
    (a_digits, a_exponent), (b_digits, b_exponent) = np.frexp(a), np.frexp(b)
    exponent = a_exponent + b_exponent
    scaled = np.ldexp(c, -exponent)
    product, rest = _exact_product(a_digits, b_digits)
    high, low = _exact_sum(scaled, rest)
    high, middle = _exact_sum(product, high)
    total = high + _sum_rounded_to_odd(middle, low)
    result = np.ldexp(total, exponent)
    near = (abs(scaled) > 2.0**-200) & (abs(scaled) < 2.0**200) | (c == 0)
    normal = (abs(result) > np.finfo(np.float64).smallest_normal) | (total == 0)
    finite = np.isfinite(a) & np.isfinite(b)
    not_rounded = ~finite | (a == 0) | (b == 0)
    result = np.where(not_rounded, a * b + c, np.where(np.isfinite(c), result, c))
    for i in np.flatnonzero(~(near & normal | not_rounded) & np.isfinite(c)):
        result[i] = _fma(float(a[i]), float(b[i]), float(c[i]))
    return result


def _exact_product(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x y as a float64 and the rest that it lacks, from products of half of the digits, which are exact."""
    product = x * y
    (x, x_low), (y, y_low) = _halves(x), _halves(y)
    return product, x * y - product + x * y_low + x_low * y + x_low * y_low


def _halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    shifted = (2.0**27 + 1) * x
    high = shifted - (shifted - x)
    return high, x - high


def _exact_sum(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x + y as a float64 and the rest that it lacks."""
    total = x + y
    part = total - x
    return total, (x - (total - part)) + (y - part)


def _sum_rounded_to_odd(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x + y with the last bit set if it is not exact, so that rounding it again is as good as rounding once."""
    total, error = _exact_sum(x, y)
    bits = total.view(np.int64)
    even = (error != 0) & (bits & 1 == 0) & np.isfinite(total)
    towards_error = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(even, bits + towards_error, bits).view(np.float64)


def _fma(a: float, b: float, c: float) -> float:
    """With exact fractions, which are slow: for subnormal results and very unequal numbers."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
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
    limits, unsigned = np.iinfo(dtype), np.dtype(f"u{np.dtype(dtype).itemsize}")
    wide = x.itemsize == 8 or limits.bits == 64
    result = np.where(x > 0, dtype(limits.max), dtype(limits.min))
    whole = np.trunc(x.astype(np.float64))
    inside = (whole >= limits.min) & (whole < float(limits.max + 1))
    result[inside] = whole[inside].astype(dtype)
    result[np.isnan(x)] = unsigned.type((1 << limits.bits - 1) if wide else 0).view(dtype)
    return result
