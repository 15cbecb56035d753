"""Fused half-steps of the reversible iteration: each is one pass over memory, in place.

    relax            y <- (1 - beta) y + beta f(z)                  a half-step (equation 5 of the paper)
    invert           y <- (y - beta f(z)) / (1 - beta)              its inverse (equation 6)
    invert_adjoint   the inverse, and z_bar <- (1 - beta) z_bar + beta vjp, the adjoint of z (Algorithm 1)

These are torch operators for a float64 state. `ExactState` is a state of integers, whose half-steps are inverted to the
last bit. reference.py has the loops around them, and specifies every bit of what the other backends compute:

    state      specification          C                Triton
    float64    reference.py           cpu/float64.c    gpu/float64.py
    integers   reference_exact.py     cpu/exact.c      gpu/exact.py

CPU tensors are computed in C, and those on a GPU in Triton (backends.py). `REVDEQ_BACKEND=triton|cpu|reference` in the
environment or `with backend("triton"):` forces a backend.
"""

if __name__ != "revdeq.kernels":
    raise ImportError(
        f"the folder kernels/ of revdeq was imported as {__name__!r}: import revdeq.kernels, or start Python in "
        "another folder if you meant Hugging Face's package kernels"
    )

from .backends import backend
from .exact_state import ExactState
from .operators import invert, invert_adjoint, relax

__all__ = ["ExactState", "backend", "invert", "invert_adjoint", "relax"]
