"""Checks of arguments, before anything is written: kernels index the memory of all their tensors alike."""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from .half_step import DTYPES, Coefficients, same_layout, wide


def check_kinds(beta: Any, gamma: Any, dtype: Any, **tensors: Any) -> None:
    """Raise for what torch's dispatcher would hide or refuse, and name the argument. Only z and other may be None."""
    for name, x in tensors.items():
        if x is None and name in ("z", "other"):
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} = {x!r} must be a tensor")
        if x.layout is not torch.strided or x.is_nested:
            raise TypeError(f"{name} is sparse or nested ({x.layout}): it must be a plain tensor")
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires a gradient, which is not recorded: detach it, or use torch.no_grad()")
        if name in ("y", "adjoint") and not torch.compiler.is_compiling() and x.is_neg():
            raise ValueError(f"{name} has torch's negative bit, though it is written: use {name}.resolve_neg()")
    for name, number in (("beta", beta), ("gamma", gamma)):
        if not isinstance(number, (int, float)):
            raise TypeError(f"{name} = {number!r} must be a number")
    if dtype is not None and dtype not in DTYPES:
        raise TypeError(f"dtype = {dtype!r} must be one of {DTYPES}, or None")


@functools.lru_cache(64)
def coefficients(beta: float, gamma: float) -> Coefficients:
    """The rounded coefficients of a half-step that has an inverse."""
    step = Coefficients.rounded(beta, gamma)
    if not math.isfinite(step.a):
        raise ValueError(f"beta = {beta} and gamma = {gamma} must be finite, and in the range of float32")
    if abs(step.a) < 1e-6:
        raise ValueError(f"beta = {beta} must not be 1, because the inverse divides by 1 - beta: try 0.5 or 0.8")
    return step


Inputs = dict[str, Any]
"""f_z, and if they are used z, adjoint, vjp and other."""


def inputs(gamma: float, f_z: Any, z: Any, adjoint: Any = None, vjp: Any = None, other: Any = None) -> Inputs:
    """The arguments that are used, by name."""
    used = {"f_z": f_z, "z": z, "adjoint": adjoint, "vjp": vjp, "other": other}
    unused = ["z", "other"] if gamma == 1 else []
    if adjoint is None:
        unused += ["adjoint", "vjp", "other"]
    return {name: x for name, x in used.items() if name not in unused}


def read_next(y: Tensor, dtype: torch.dtype | None, used: Inputs) -> Tensor:
    """An empty tensor for what f reads next. Raises if the arguments do not fit the state y, apart from their memory: a
    tracer's tensors have no addresses."""
    check_tensor("y", y, y, y.dtype)
    check_tensor("f_z", used["f_z"], y, *DTYPES)
    read = torch.empty_like(y, dtype=dtype or used["f_z"].dtype)
    for name, x in used.items():
        if name != "f_z":
            check_tensor(name, x, y, read.dtype if name in ("z", "vjp") else wide(read.dtype))
    for name, x in (("y", y), ("adjoint", used.get("adjoint"))):
        if x is not None and not same_layout(x, read):
            dense = f"it is written, and must be dense in memory, with the strides of the state, here {read.stride()}"
            raise ValueError(f"{name} has the strides {x.stride()}: {dense}")
    return read


def check_tensor(name: str, x: Tensor | None, y: Tensor, *dtypes: torch.dtype) -> None:
    """Raise if x, the argument of this name, does not fit the state y."""
    if x is None:
        raise ValueError(f"{name} = None must be a tensor where gamma is not 1")
    if x.dtype not in dtypes:
        raise TypeError(f"{name} is {x.dtype}: it must be {' or '.join(map(str, dtypes))}; convert it with {name}.to")
    if x.shape != y.shape:
        raise ValueError(f"{name} has the shape {tuple(x.shape)}: it must be that of the state, {tuple(y.shape)}")
    if x.device != y.device:
        raise ValueError(f"{name} is on {x.device}: it must be on the device of the state, {y.device}")


def check_memory(y: Tensor, used: Inputs) -> None:
    """Raise if y or the adjoint overlaps in memory with another tensor, or if a tensor has no memory."""
    written: list[tuple[str, int, int]] = []
    for name, x in {"y": y, "adjoint": used.get("adjoint"), **used}.items():
        if x is None or not same_layout(x, y):  # in another layout, it is copied before anything is written
            continue
        start, end = x.data_ptr(), x.data_ptr() + x.nbytes
        if start == 0 < end:
            raise TypeError(f"{name} is a {type(x).__name__} without memory of its own: it must be a plain tensor")
        for other, first, last in written:
            if start < last and first < end and name != other:
                raise ValueError(f"{name} and {other}, which is written, overlap in memory: clone one of them")
        if name in ("y", "adjoint"):
            written.append((name, start, end))
