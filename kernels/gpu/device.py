"""Where the Triton kernels run, and why they cannot."""

import functools

import torch
import triton

from ..._device import is_capturing
from .float64 import RELAX_BLOCK, _relax_kernel
from .launch import on, warps


@functools.cache
def driver_trouble(kind: str) -> str:
    """Why Triton cannot launch on this type of GPU, or "". Triton compiles its driver when it is first used."""
    if not getattr(torch, kind).is_available():
        return ""
    try:
        triton.runtime.driver.active.utils  # noqa: B018
    except Exception as error:
        return f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return ""


def kernel_trouble(device: torch.device) -> str:
    """Why a kernel cannot be compiled for this GPU or loaded on it, or "". The GPU may be newer than Triton, or its
    driver older. Nothing is tried during graph capture."""
    if not getattr(torch, device.type).is_available() or has_stand_in() or is_capturing(device):
        return ""
    return _first_kernel_trouble(device)


@functools.cache
def _first_kernel_trouble(device: torch.device) -> str:
    """Compile and load the first kernel of a solve, without launching it."""
    tensors, numbers = (torch.float64, torch.float32, None, torch.float32, None), (1, 0.5, 0.5, 0.0)
    try:
        with on(device):
            kernel = _relax_kernel.warmup(
                *tensors, *numbers, 1, True, RELAX_BLOCK, grid=(1,), num_warps=warps(device), enable_fp_fusion=False
            )
            getattr(kernel, "run", None)  # loads it; a compilation hook may have returned None
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return ""


def runs_on(device: torch.device) -> bool:
    """Whether kernels can be launched on tensors of this device: on a GPU, or on a CPU that emulates one."""
    return device.type in ("cuda", "xpu") or (device.type == "cpu" and has_stand_in())


def has_stand_in() -> bool:
    """Whether Triton's interpreter or an emulator executes the kernels."""
    interpreted = not isinstance(_relax_kernel, triton.runtime.JITFunction)
    return interpreted or triton.runtime.JITFunction.run.__module__ != "triton.runtime.jit"
