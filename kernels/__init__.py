"""Fused half-steps of the reversible iteration.

`relax` and `relax_norms` are the update, `invert` is its inverse, `invert_adjoint` the fused backward step, and
`invert_compare` the last backward step, which compares the reconstruction with the initial state. half_step.py
describes their arguments. All backends compute the same bits:

    state      specification          C                Triton
    float64    reference.py           cpu/float64.c    gpu/float64.py
    integers   reference_exact.py     cpu/exact.c      gpu/exact.py

The backend follows the tensors (backends.py); `REVDEQ_BACKEND=triton|cpu|reference` in the environment or
`with backend("triton"):` forces one.
"""

if __name__ != "revdeq.kernels":
    raise ImportError(
        f"the folder kernels/ of revdeq was imported as {__name__!r}: import revdeq.kernels, or start Python in another "
        "folder if you meant Hugging Face's package kernels"
    )

from .backends import backend, half_step_for
from .half_step import Coefficients
from .radix import Radix

__all__ = ["Coefficients", "Radix", "backend", "half_step_for"]
