"""Reversible deep equilibrium models: exact gradients in almost constant memory."""

import importlib as _importlib
import sys as _sys
import warnings as _warnings
from pathlib import Path as _Path
from typing import Any as _Any

if "torch" not in _sys.modules:
    _warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch's own: NumPy is not needed here
import torch as _torch

if tuple(map(int, _torch.__version__.split(".")[:2])) < (2, 10):  # before anything fails with an obscure error
    raise ImportError(f"revdeq needs torch 2.10 or later, this is {_torch.__version__}: pip install 'torch>=2.10'")

# If the repository is imported without installation, the kernels are in the folder beside this one.
if not (_Path(__file__).parent / "kernels").exists():
    __path__.append(str(_Path(__file__).parent.parent))

from . import kernels
from ._solver.check import ConvergenceError, ConvergenceWarning, ReconstructionError, ReconstructionWarning
from ._solver.layer import RevDEQ
from ._solver.loop import loop
from ._solver.options import Exact, Options
from ._solver.solve import Solution, solve, steps
from ._solver.tune import Tuning, tune
from ._solver.verify import Report, verify

__version__ = "0.4.0"
__all__ = [
    "ConvergenceError",
    "ConvergenceWarning",
    "Exact",
    "Options",
    "ReconstructionError",
    "ReconstructionWarning",
    "Report",
    "RevDEQ",
    "Solution",
    "Tuning",
    "baselines",
    "kernels",
    "loop",
    "models",
    "solve",
    "steps",
    "training",
    "tune",
    "verify",
]

_LAZY = ("baselines", "models", "training")
"""Modules that are imported on first use."""


def __getattr__(name: str) -> _Any:
    if name in _LAZY:
        return _importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
