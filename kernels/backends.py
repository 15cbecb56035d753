"""Which implementation of the half-steps runs on which device."""

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from . import cpu, exact, reference

try:
    from . import gpu, gpu_exact
except ImportError:  # Triton exists on Linux only
    gpu = gpu_exact = None  # type: ignore[assignment]

NAMES = ("triton", "cpu", "reference")

_forced: ContextVar[str | None] = ContextVar("revdeq_backend", default=None)


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Force a backend, "triton", "cpu" or "reference", for the solves and kernels called inside."""
    token = _forced.set(_known(name, "backend(name)"))
    try:
        yield
    finally:
        _forced.reset(token)


def half_step(device: torch.device) -> type[reference.HalfStep]:
    """The class of half-step, with a float64 state, that runs on this device."""
    return {"triton": lambda: gpu.HalfStep, "cpu": lambda: cpu.HalfStep, "reference": lambda: reference.HalfStep}[
        _name(device)
    ]()


def exact_half_step(device: torch.device) -> type[exact.HalfStep]:
    """The same with an integer state."""
    return {
        "triton": lambda: gpu_exact.HalfStep,
        "cpu": lambda: cpu.ExactHalfStep,
        "reference": lambda: exact.HalfStep,
    }[_name(device)]()


def _name(device: torch.device) -> str:
    """Of the backend that runs on this device: the one that is forced, or the fastest."""
    name = _forced.get()
    if name is None and (setting := os.environ.get("REVDEQ_BACKEND")):
        name = _known(setting, "REVDEQ_BACKEND")
    if name is None:
        if device.type == "cpu":
            return "reference" if cpu.library is None else "cpu"
        return "triton" if gpu is not None and gpu.runs_on(device) else "reference"
    if name == "triton":
        if gpu is None:
            raise RuntimeError("backend 'triton' is forced, but Triton is not installed: `pip install triton` (Linux)")
        if not gpu.runs_on(device):
            raise RuntimeError(
                f"backend 'triton' is forced, but it cannot run on {device.type} tensors: move them to a GPU, "
                "or set TRITON_INTERPRET=1 before revdeq is imported"
            )
    if name == "cpu":
        if cpu.library is None:
            raise RuntimeError(
                "backend 'cpu' is forced, but the C kernel was not built: install a C compiler and reinstall revdeq"
            )
        if device.type != "cpu":
            raise RuntimeError(
                f"backend 'cpu' is forced, but it cannot run on {device.type} tensors: move them to the CPU"
            )
    return name


def _known(name: str, source: str) -> str:
    if name not in NAMES:
        raise ValueError(f"{source} is {name!r}: expected one of {', '.join(map(repr, NAMES))}")
    return name
