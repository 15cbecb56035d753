"""What numpy lacks: a fused multiply-add, bfloat16, and conversions to integers that saturate."""

import ctypes

import numpy as np

LIBM = ctypes.CDLL("libm.so.6")
for function, kind in ((LIBM.fma, ctypes.c_double), (LIBM.fmaf, ctypes.c_float)):
    function.restype, function.argtypes = kind, [kind] * 3


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a b + c, rounded once."""
    return np.frompyfunc({4: LIBM.fmaf, 8: LIBM.fma}[a.itemsize], 3, 1)(a, b, c).astype(a.dtype)


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
