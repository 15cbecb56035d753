"""The registry of backends: their devices, their states, and why one is unavailable."""

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from . import cpu, reference, reference_exact
from .half_step import HalfStep

gpu: Any
try:
    from . import gpu
except ImportError:  # Triton exists on Linux only
    gpu = None


class Trouble(NamedTuple):
    """Why something cannot run, and what to do about it."""

    why: str
    remedy: str


@dataclass(frozen=True)
class Backend:
    """An implementation of the half-steps.

    devices: the device types that it supports; None is all.
    states: the class of half-steps of each state.
    missing: the trouble if it is not installed. misplaced: the trouble on a device where it does not run.
    repair: what to do if its bits differ from the reference.
    """

    name: str
    title: str
    devices: tuple[str, ...] | None
    states: dict[str, type[HalfStep]]
    missing: Callable[[], Trouble | None]
    misplaced: Callable[[torch.device], Trouble | None]
    repair: str

    def trouble_on(self, device: torch.device) -> Trouble | None:
        return self.missing() or self.misplaced(device)


def _no_triton() -> Trouble | None:
    if gpu:
        return None
    return Trouble("Triton is not installed", "install it with `pip install triton` (Linux)")


def _not_for_triton(device: torch.device) -> Trouble | None:
    if gpu.runs_on(device):
        if device.type not in ("cuda", "xpu"):
            return None
        if why := gpu.driver_trouble(device.type):
            remedy = "install gcc, python3-dev and the driver of the GPU"
            return Trouble(f"Triton cannot build its driver ({why})", remedy)
        if why := gpu.kernel_trouble(device):
            remedy = "update Triton and the driver of the GPU"
            return Trouble(f"Triton cannot compile or load its kernels ({why})", remedy)
        return None
    remedy = "move them to a GPU, or set TRITON_INTERPRET=1 before revdeq is imported"
    return Trouble(f"it cannot run on {device.type} tensors", remedy)


def _no_library() -> Trouble | None:
    if cpu.library is not None:
        return None
    if cpu.trouble:
        return Trouble(f"the C kernel cannot be loaded ({cpu.trouble})", cpu.remedy(cpu.trouble))
    return Trouble("the C kernel was not built", "install a C compiler and reinstall revdeq")


def _not_for_c(device: torch.device) -> Trouble | None:
    if device.type == "cpu":
        return None
    return Trouble(f"it cannot run on {device.type} tensors", "move them to the CPU")


TRITON = Backend(
    "triton",
    "Triton's kernels",
    ("cuda", "xpu"),
    dict(gpu.STATES) if gpu else {},
    _no_triton,
    _not_for_triton,
    "update Triton and the driver",
)
C = Backend(
    "cpu",
    "the C kernel",
    ("cpu",),
    {"float64": cpu.HalfStep, "exact": cpu.ExactHalfStep},
    _no_library,
    _not_for_c,
    "rebuild the C kernel (pip install --force-reinstall --no-deps; no -ffast-math or -Ofast in CFLAGS)",
)
REFERENCE = Backend(
    "reference",
    "PyTorch's own operations",
    None,
    {"float64": reference.HalfStep, "exact": reference_exact.HalfStep},
    lambda: None,
    lambda device: None,
    "reinstall torch",
)
BACKENDS = {backend.name: backend for backend in (TRITON, C, REFERENCE)}
"""By name. The first one that can run on a device is used."""

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
    """The forced backend, or the fastest one that runs on this device. A slower one than is meant for it warns once.

    Raises:
        RuntimeError: The forced backend cannot run there.
        ValueError: REVDEQ_BACKEND is not a backend.
    """
    name = _forced.get()
    if name is None and (setting := os.environ.get("REVDEQ_BACKEND")):
        name = _known(setting, "REVDEQ_BACKEND")
    if name is not None:
        if trouble := BACKENDS[name].trouble_on(device):
            raise RuntimeError(f"backend {name!r} is forced, but {trouble.why}: {trouble.remedy}")
        return BACKENDS[name]
    best, *others = (b for b in BACKENDS.values() if b.devices is None or device.type in b.devices)
    trouble = best.trouble_on(device)
    if trouble is None:
        return best
    instead = next(b for b in others if b.trouble_on(device) is None)
    if best is not C or not cpu.trouble:  # loading a broken library has already warned
        _warn(trouble, instead.title)
    return instead


@functools.cache
def _warn(trouble: Trouble, instead: str) -> None:
    warnings.warn(
        f"{trouble.why}, so {instead} run instead, which are slower (2 to 3 times with an exact state): "
        f"{trouble.remedy}",
        RuntimeWarning,
        stacklevel=3,
    )


def _known(name: str, source: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{source} is {name!r}: expected one of {', '.join(map(repr, BACKENDS))}")
    return name
