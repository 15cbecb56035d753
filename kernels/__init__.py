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

if __name__ == "revdeq.kernels":
    from .backends import backend, half_step_for
    from .half_step import Coefficients
    from .radix import Radix

    __all__ = ["Coefficients", "Radix", "backend", "half_step_for"]
else:
    # With the checkout as the current folder, this package hides Hugging Face's package `kernels`, which transformers
    # imports. Load that one from further down the path, or an empty module.
    import sys
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec
    from pathlib import Path

    root, __path__ = Path(__file__).resolve().parents[1], []
    spec = PathFinder.find_spec(__name__, [folder for folder in sys.path if Path(folder).resolve() != root])
    if spec is not None and spec.loader is not None:  # a namespace has no loader
        sys.modules[__name__] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[__name__])
