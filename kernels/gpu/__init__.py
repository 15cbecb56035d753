"""The half-steps in Triton."""

from . import exact, float64
from .device import driver_trouble, kernel_trouble, runs_on

STATES = {"float64": float64.HalfStep, "exact": exact.HalfStep}
"""The class of each state."""

__all__ = ["STATES", "driver_trouble", "kernel_trouble", "runs_on"]
