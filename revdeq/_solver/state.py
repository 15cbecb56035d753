"""States: a tensor, or a nested tuple, list or dict of tensors, flattened to a list."""

from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    register_dataclass,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

from ..kernels.half_step import DTYPES, LANES, layout

State = list[Tensor]

_LEAF = tree_flatten(0)[1]

TRANSFORMED = (
    "solve does not work inside a torch.func transform (grad, vmap, ...): call it outside, with a batch dimension "
    "instead of vmap and with autograd instead of grad"
)


def refuse_device(name: str, device: torch.device) -> None:
    if device.type == "meta":
        raise ValueError(f"{name} is on the meta device: move it to a real one")
    if device.type == "mps":
        raise ValueError(f"{name} is on {device}, which does not support float64 states: move it and f to the CPU")


def checked_state(z0: Any, called: str = "z0") -> tuple[State, TreeSpec]:
    """The tensors of z0, and its structure."""
    paths: list[Any]
    if isinstance(z0, Tensor):
        paths, spec = [((), z0)], _LEAF
    else:
        _register_dataclasses(z0)
        paths, spec = tree_flatten_with_path(z0)
    if not paths:
        raise ValueError(f"{called} = {z0!r} contains no tensor: pass a tensor, or a tuple, list or dict of tensors")
    leaves = []
    for path, x in paths:
        name = f"{called}{keystr(path)}"
        if not isinstance(x, Tensor):
            raise TypeError(
                f"{name} is of type {type(x).__name__}: it must be a tensor (or a tuple, list or dict of tensors)"
            )
        if x.dtype not in DTYPES:
            remedy = f"torch.view_as_real({name})" if x.is_complex() else f"{name}.float()"
            raise TypeError(f"{name} is {x.dtype}: it must be float32, float64, bfloat16 or float16; use {remedy}")
        if x.is_nested or holds_others(x):
            kind = "NestedTensor" if x.is_nested else type(x).__name__
            raise TypeError(f"{name} is a {kind}, which wraps other tensors: solve for those")
        if x.layout != torch.strided:
            raise TypeError(f"{name} has layout {x.layout}: it must be dense; convert it with {name}.to_dense()")
        if x.device != paths[0][1].device:
            raise ValueError(
                f"{name} is on {x.device} and the first tensor of {called} on {paths[0][1].device}: use one device"
            )
        refuse_device(name, x.device)
        refuse_transformed(x)
        # Inference tensors cannot be saved for the backward pass, but copies can.
        leaves.append(x.clone() if x.is_inference() and torch.is_grad_enabled() else x.resolve_neg())
    return leaves, spec


def refuse_transformed(x: Tensor) -> None:
    """Raise if x belongs to a forward-mode derivative or to a torch.func transform."""
    if forward_ad.unpack_dual(x).tangent is not None:
        raise RuntimeError(
            "solve has no forward-mode derivative (torch.autograd.forward_ad, torch.func.jvp), and the tangent would "
            "be lost: use reverse mode, or call solve outside of the dual level"
        )
    if not has_memory(x):
        raise TypeError(TRANSFORMED)


def has_memory(x: Tensor) -> bool:
    """Whether kernels can read x. A wrapper of torch.func has no address."""
    try:
        x.data_ptr()
    except RuntimeError:
        return False
    return True


def structured(state: State, spec: TreeSpec) -> Any:
    """Unflatten tensors into the structure of z0."""
    return state[0] if spec.is_leaf() else tree_unflatten(state, spec)


def checked_y0(y0: Any, initial: State, spec: TreeSpec) -> State:
    """The tensors of y0, after a check that they match z0."""
    leaves, structure = checked_state(y0, "y0")
    likes = [[(x.shape, x.dtype, x.device) for x in state] for state in (leaves, initial)]
    if structure != spec or likes[0] != likes[1]:
        raise ValueError("y0 must have the structure, shapes, dtypes and device of z0")
    return leaves


def _register_dataclasses(tree: Any) -> None:
    """Register dataclasses with torch's pytrees."""
    while found := {type(x) for x in tree_leaves(tree) if is_dataclass(x) and not isinstance(x, type)}:
        for kind in found:
            register_dataclass(kind)


def versions_of(*states: State) -> list[int | None]:
    """The version counter of a tensor; inference tensors have none."""
    return [None if x.is_inference() else x._version for state in states for x in state]


def holds_others(x: Tensor) -> bool:
    """Whether x is a wrapper of other tensors, such as a DTensor, without its own memory."""
    if type(x) in (Tensor, torch.nn.Parameter):
        return False
    if hasattr(x, "__tensor_flatten__"):
        return True
    try:
        return x.layout is torch.strided and x.numel() > 0 and x.untyped_storage().data_ptr() == 0
    except (RuntimeError, NotImplementedError):
        return True


def flattened(result: Any, state: State, spec: TreeSpec) -> State:
    """The tensors that f returned, after a check that they match the state. The keys of a dict may be in any order."""
    if spec.is_leaf():
        outputs, has_structure = [result], isinstance(result, Tensor)
    else:
        try:
            outputs, has_structure = spec.flatten_up_to(result), True
        except ValueError:
            outputs, has_structure = [], False
    if has_structure and all(map(_fits, outputs, state)):
        return outputs
    if not has_structure:
        expected = tree_unflatten(["Tensor"] * len(state), spec)
        returned = tree_map(lambda x: type(x).__name__, result)
        raise TypeError(f"f returned {returned}: it must have the structure of z0, {expected}")
    outputs = list(map(_unwrapped, outputs))
    fits = list(map(_fits, outputs, state))
    if all(fits):
        return outputs
    i = fits.index(False)
    raise _misfit(
        "f's output" if len(outputs) == 1 else f"f's output (leaf {i} of {len(outputs)})", outputs[i], state[i]
    )


def _unwrapped(out: Any) -> Any:
    """Wait for the result of an asynchronous collective."""
    if isinstance(out, Tensor) and type(out).__name__ == "AsyncCollectiveTensor":
        return out.clone()
    return out


def _fits(out: Any, x: Tensor) -> bool:
    return (
        isinstance(out, Tensor)
        and out.dtype in DTYPES
        and out.shape == x.shape
        and out.device == x.device
        and out.layout is torch.strided
        and not holds_others(out)
    )


def _misfit(name: str, out: Any, x: Tensor) -> Exception:
    if not isinstance(out, Tensor):
        return TypeError(f"{name} is of type {type(out).__name__}: it must be a tensor of shape {tuple(x.shape)}")
    if holds_others(out):
        remedy = ".to_local() or .full_tensor()" if hasattr(out, "to_local") else "the tensors inside it"
        return TypeError(f"{name} is a {type(out).__name__}, which wraps other tensors: return {remedy}")
    if out.shape != x.shape:
        return ValueError(
            f"{name} has shape {tuple(out.shape)}: it must have the shape of z0, {tuple(x.shape)} (a layer's default "
            "is that of x; to change it, pass deq(x, z0=...))"
        )
    if out.device != x.device:
        return ValueError(f"{name} is on {out.device}: it must be on the device of z0, {x.device}")
    if out.layout != torch.strided:
        return TypeError(f"{name} has layout {out.layout}: it must be dense; use to_dense()")
    return TypeError(f"{name} is {out.dtype}: it must be float32, float64, bfloat16 or float16; convert it inside f")


def laid_out_like(outputs: State, state: State) -> State:
    """Empty tensors for the state, with the memory layout of f's outputs if that is dense. Otherwise each output would
    have to be converted."""
    return [
        torch.empty_like(x)
        if layout(out) == layout(x) or x.numel() == 0 or not is_dense(out)
        else x.new_empty_strided(x.shape, out.stride())
        for out, x in zip(outputs, state, strict=True)
    ]


def is_batch_outermost(x: Tensor) -> bool:
    """Whether examples, the first dimension, are consecutive in memory."""
    return len(x) < 2 or x.numel() == 0 or x.stride(0) == x.numel() // len(x)


def checked_batch(leaves: State, spec: TreeSpec) -> None:
    """Raise if the tensors of z0 have no common batch dimension."""
    paths = [path for path, _ in tree_flatten_with_path(tree_unflatten(leaves, spec))[0]]
    sizes = {f"z0{keystr(path)}": tuple(x.shape) for path, x in zip(paths, leaves, strict=True)}
    for name, shape in sizes.items():
        if not shape:
            raise ValueError(
                f"{name} has no dimension, but per_example=True needs a batch dimension: add one, or leave "
                "per_example out"
            )
    if len({shape[0] for shape in sizes.values()}) > 1:
        listed = ", ".join(f"{name} of shape {shape}" for name, shape in sizes.items())
        raise ValueError(
            f"the tensors of z0 differ in their first dimension, the batch with per_example=True: {listed}; make them "
            "equal, or leave per_example out"
        )


def dense(grads: Any, like: State) -> State:
    """Convert gradients to dense tensors: None if f does not depend on a part of the state, and some are sparse."""
    return [
        torch.zeros_like(x) if g is None else g if g.layout is torch.strided else g.to_dense()
        for g, x in zip(grads, like, strict=True)
    ]


def two_like(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Memory for two tensors like x, which is dense, as two rows, and both tensors: one kernel can compute both. Rows
    are longer than x, because kernels need aligned memory."""
    room = -(-x.numel() // LANES) * LANES
    rows = x.new_empty((2, room), dtype=dtype)
    return rows, rows.as_strided((2, *x.shape), (room, *x.stride()))


def is_dense(x: Tensor) -> bool:
    """Whether its elements fill their memory, in any order."""
    return x.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(x)
