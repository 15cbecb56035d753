"""The registry of backends: where each runs, its half-steps, and why one cannot run."""

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from . import cpu, reference, reference_exact
from .half_step import Coefficients, HalfStep
from .radix import Radix

gpu: Any
try:
    from . import gpu
except ImportError:  # Triton exists on Linux only
    gpu = None

Trouble: TypeAlias = tuple[str, str] | None
"""Why something cannot run, and what to do about it."""


@dataclass(frozen=True)
class Backend:
    """An implementation: the types of devices that it is meant for, the class of the half-steps of each state, why it
    cannot run on a device, and what to do if its bits differ from the reference."""

    name: str
    title: str
    devices: tuple[str, ...]
    states: dict[str, type[HalfStep]]
    trouble_on: Callable[[torch.device], Trouble]
    repair: str


def _trouble_of_triton(device: torch.device) -> Trouble:
    if not gpu:
        return "Triton is not installed", "install it with `pip install triton` (Linux)"
    if not gpu.runs_on(device):
        remedy = "move them to a GPU, or set TRITON_INTERPRET=1 before revdeq is imported"
        return f"it cannot run on {device.type} tensors", remedy
    if device.type == "cpu":
        return None
    if why := gpu.driver_trouble(device.type):
        return f"Triton cannot build its driver ({why})", "install gcc, python3-dev and the driver of the GPU"
    if why := gpu.kernel_trouble(device):
        return f"Triton cannot compile or load its kernels ({why})", "update Triton and the driver of the GPU"
    if device.type == "xpu" and not _same_bits(device):
        why = "Triton's kernels compute other bits than PyTorch on this GPU"
        return why, "update Triton, or report it: Intel's GPUs are experimental"
    return None


def _trouble_of_c(device: torch.device) -> Trouble:
    if cpu.library is None:
        return cpu.trouble
    if device.type != "cpu":
        return f"it cannot run on {device.type} tensors", "move them to the CPU"
    return None


TRITON = Backend(
    "triton", "Triton's kernels", ("cuda", "xpu"), dict(gpu.STATES) if gpu else {}, _trouble_of_triton,
    "update Triton and the driver",
)  # fmt: skip
C = Backend(
    "cpu", "the C kernel", ("cpu",), {"float64": cpu.HalfStep, "exact": cpu.ExactHalfStep}, _trouble_of_c,
    "rebuild the C kernel (pip install --force-reinstall --no-deps; no -ffast-math or -Ofast in CFLAGS)",
)  # fmt: skip
REFERENCE = Backend(
    "reference", "PyTorch's own operations", (), {"float64": reference.HalfStep, "exact": reference_exact.HalfStep},
    lambda device: None, "reinstall torch",
)  # fmt: skip
BACKENDS = {backend.name: backend for backend in (TRITON, C, REFERENCE)}

_forced: ContextVar[str | None] = ContextVar("revdeq_backend", default=None)


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Force a backend for the solves and kernels that are called inside of a `with` block.

    Args:
        name: "triton", "cpu" or "reference".

    Returns:
        A context manager.

    Raises:
        ValueError: There is no backend of this name.
        RuntimeError: At the first call inside, if the backend cannot run. The message says why and what to do.

    Example:
        >>> with revdeq.kernels.backend("reference"):
        ...     z = revdeq.solve(f, z0, x).z
    """
    token = _forced.set(_known(name, "backend(name)"))
    try:
        yield
    finally:
        _forced.reset(token)


def backend_for(device: torch.device) -> Backend:
    """The forced backend; or that which is meant for the device, or the reference, with one warning, if it cannot run.

    Raises:
        RuntimeError: The forced backend cannot run there.
        ValueError: REVDEQ_BACKEND is not a backend.
    """
    name = _forced.get()
    if name is None and (setting := os.environ.get("REVDEQ_BACKEND")):
        name = _known(setting, "REVDEQ_BACKEND")
    if name is not None:
        if trouble := BACKENDS[name].trouble_on(device):
            raise RuntimeError(f"backend {name!r} is forced, but {': '.join(trouble)}")
        return BACKENDS[name]
    for meant in (TRITON, C):
        if device.type in meant.devices:
            trouble = meant.trouble_on(device)
            if trouble is None:
                return meant
            _warn(*trouble)
    return REFERENCE


@functools.cache
def _warn(why: str, remedy: str) -> None:
    slower = f"{REFERENCE.title} run instead, which are slower (2 to 3 times with an exact state)"
    warnings.warn(f"{why}, so {slower}: {remedy}", RuntimeWarning, stacklevel=3)


def _known(name: str, source: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{source} is {name!r}: expected one of {', '.join(map(repr, BACKENDS))}")
    return name


@functools.cache
def _same_bits(device: torch.device) -> bool:
    """Whether Triton's kernels compute the reference's bits. Intel's compiler contracts a multiply-add by default."""
    steps = {"float64": Coefficients.rounded(0.8, 0.7), "exact": Radix.nearest(0.8, 24, 0.7)}
    return all(
        torch.equal(ours, expected)
        for state, step in steps.items()
        for ours, expected in zip(*(_results(b.states[state], step, device) for b in (TRITON, REFERENCE)), strict=True)
    )


def _results(kind: Any, step: Any, device: torch.device) -> list[Tensor]:
    """Half-steps there and back of 5,000 numbers without a pattern, and the sums and the adjoint."""
    x, f_z, z, vjp, adjoint = torch.arange(1.0, 25_001).sin().to(device).view(5, 5000).unbind()
    h, read = kind.encoded(x, step), torch.empty_like(x)
    results = [h.relax_norms(f_z, z, read), h.state.clone(), read.clone()]
    h.invert_adjoint(f_z, z, read, adjoint, vjp, vjp)
    return [*results, h.state, read, adjoint]
