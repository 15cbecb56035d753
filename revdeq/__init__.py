"""Reversible deep equilibrium models: exact gradients in constant memory."""

from . import kernels
from .module import RevDEQ
from .monitor import ReconstructionError, ReconstructionWarning
from .solve import Solution, solve
from .verify import verify

__version__ = "0.1.0"
__all__ = ["ReconstructionError", "ReconstructionWarning", "RevDEQ", "Solution", "kernels", "solve", "verify"]
