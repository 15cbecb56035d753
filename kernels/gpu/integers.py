"""The integer arithmetic that reference_exact.py specifies, mostly in 32 bits.

A half-step and its inverse are one function, with p and d exchanged:

    e = R mod from, R = floor(R / from)
    T = sign (from Y + e) + weight F
    Y = floor(T / to), R = R to + (T mod to)

`from` and `to` are arguments, so that another beta compiles nothing. Division by n <= 64 is multiplication by the
reciprocal m = floor(2^31 / n) + 1: floor(x / n) = floor(x m / 2^31) for 0 <= x < n 2^19. Proof: m n exceeds 2^31 by
e <= n, so x m / 2^31 exceeds x / n by x e / (2^31 n) < n e / (2^12 n) <= 1 / n, and the next integer is at least 1 / n
away. Larger numbers are divided in two digits, of which the lower has 19 bits.
"""

import triton
import triton.language as tl


@triton.jit
def rounded(g, UNIT: tl.constexpr):
    """g in units of 2^-G, rounded to the nearest even, and whether it fits into 32 bits (it is 0 if not)."""
    if g.dtype == tl.float64:
        scaled = g * (1 / UNIT)
        size = tl.abs(scaled)
        whole = tl.where(size < 4503599627370496.0, (size + 4503599627370496.0) - 4503599627370496.0, size)
    else:
        scaled = g.to(tl.float32) * (1 / UNIT)
        size = tl.abs(scaled)
        whole = tl.where(size < 8388608.0, (size + 8388608.0) - 8388608.0, size)
    fits = whole < 2147483648.0
    number = tl.where(fits, whole, 0.0).to(tl.int32)
    return tl.where(scaled < 0.0, -number, number).to(tl.int64), fits


@triton.jit
def divided(x, n, by):
    """Quotient and remainder of 0 <= x < 2^41 by n, in 32-bit arithmetic except at both ends."""
    high = (x >> 19).to(tl.uint32)
    quotient = tl.umulhi(high * 2, by)
    low = ((high - quotient * n) << 19) | (x.to(tl.uint32) & 0x7FFFF)
    second = tl.umulhi(low * 2, by)
    return (quotient.to(tl.int64) << 19) + second.to(tl.int64), low - second * n


@triton.jit
def stepped(y, r, number, step):
    """Y and R after a half-step, or after its inverse. Y is correct if its magnitude is below 2^34."""
    start, to, sign, weight, by_start, by_to = step
    rest, e = divided(r, start.to(tl.uint32), by_start.to(tl.uint32))
    t = (sign * start) * y + sign * e.to(tl.int64) + weight * number
    after, remainder = divided(t + (to.to(tl.int64) << 34), to.to(tl.uint32), by_to.to(tl.uint32))
    return after - 17179869184, (rest.to(tl.uint32) * to.to(tl.uint32) + remainder).to(tl.int64)


def reciprocal(n: int) -> int:
    """For division by n."""
    return 2**31 // n + 1
