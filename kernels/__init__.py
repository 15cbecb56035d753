"""Fused half-steps of the reversible iteration.

`relax` and `relax_norms` are the update, `invert` its inverse, `invert_adjoint` the fused backward pass, and
`invert_compare` the end of it, where the reconstruction meets the state that it should arrive at. Each exists
three times, with the same bits: in PyTorch (reference.py, the specification), in C (cpu.c) and in Triton
(gpu.py). The backend follows the tensors; `REVDEQ_BACKEND=triton|cpu|reference` in the environment or
`with backend("triton"):` forces one. exact.py, with cpu.c and gpu_exact.py, is the same for the integer state.
"""

if __name__ != "revdeq.kernels":
    raise ImportError(f"this folder is the package revdeq.kernels, not {__name__}: use `import revdeq.kernels`")

from .backends import backend, exact_half_step, half_step
from .operators import invert, invert_adjoint, invert_compare, relax, relax_norms

__all__ = [
    "backend",
    "exact_half_step",
    "half_step",
    "invert",
    "invert_adjoint",
    "invert_compare",
    "relax",
    "relax_norms",
]
