"""Reversible deep equilibrium models: exact gradients in constant memory."""

from pathlib import Path as _Path

# Where the repository itself is imported, and not an installation, the kernels lie beside this folder.
if not (_Path(__file__).parent / "kernels").exists():
    __path__.append(str(_Path(__file__).parent.parent))

from . import kernels
from ._solver.layer import RevDEQ
from ._solver.monitor import ReconstructionError, ReconstructionWarning
from ._solver.scheme import Exact
from ._solver.solve import Solution, solve
from ._solver.verify import verify

__version__ = "0.1.0"
__all__ = ["Exact", "ReconstructionError", "ReconstructionWarning", "RevDEQ", "Solution", "kernels", "solve", "verify"]
