"""States: a tensor, or a nested tuple, list, dict or dataclass of tensors, flattened to a list."""

import sys
from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import TreeSpec, register_dataclass, tree_flatten, tree_leaves, tree_unflatten

from ..kernels.half_step import DTYPES

State = list[Tensor]

_LEAF = tree_flatten(0)[1]


def flattened_state(z0: Any, name: str = "z0") -> tuple[State, TreeSpec]:
    """The tensors of an initial state, and its structure."""
    if isinstance(z0, Tensor):
        leaves, spec = [z0], _LEAF
    else:
        while found := {type(x) for x in tree_leaves(z0) if is_dataclass(x) and not isinstance(x, type)}:
            for kind in found:
                register_dataclass(kind)
        leaves, spec = tree_flatten(z0)
    if not leaves or not all(isinstance(x, Tensor) for x in leaves):
        raise TypeError(f"{name} = {z0!r} must be a tensor, or a tuple, list or dict of tensors")
    for x in leaves:
        if x.device != leaves[0].device or x.device.type in ("meta", "mps"):
            raise ValueError(f"{name} is on {x.device}: use one device, the CPU or a GPU")
        if problem := _problem(x):
            raise TypeError(f"{name} contains {problem}")
    # Autograd cannot save inference tensors, but copies of them.
    copies = torch.is_grad_enabled()
    return [x.clone() if copies and x.is_inference() else x.resolve_neg() for x in leaves], spec


def flattened_like(result: Any, state: Sequence[Tensor], spec: TreeSpec) -> State:
    """The tensors that f returned, after a check that they match the state."""
    try:
        outputs = [result] if spec.is_leaf() else spec.flatten_up_to(result)
    except ValueError as error:
        raise TypeError(f"f must return the structure of z0: {error}") from None
    for out, x in zip(outputs, state, strict=True):
        shape = tuple(x.shape)
        if not isinstance(out, Tensor):
            hint = "; return its first part, f(...)[0], or solve with aux=True" if isinstance(out, tuple) else ""
            raise TypeError(f"f's output is of type {type(out).__name__}: it must be a tensor of shape {shape}{hint}")
        if out.device != x.device:
            raise ValueError(f"f's output is on {out.device}: it must be on the device of z0, {x.device}")
        if problem := _problem(out):
            raise TypeError(f"f's output is {problem}")
        if out.shape != x.shape:
            raise ValueError(
                f"f's output has shape {tuple(out.shape)}: it must have the shape of z0, {shape} (a layer's default "
                "is that of x; to change it, pass deq(x, z0=...))"
            )
    return outputs


def structured(state: Sequence[Tensor], spec: TreeSpec) -> Any:
    """Tensors in the structure of z0."""
    return state[0] if spec.is_leaf() else tree_unflatten(state, spec)


def is_traced(state: State) -> bool:
    """Whether operations are being recorded, by torch.export, torch.jit.trace, make_fx or an exporter based on them,
    which would miss our kernels."""
    if torch.jit.is_tracing() or torch.compiler.is_exporting():  # type: ignore[attr-defined]
        return True
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return (proxies is not None and proxies.get_proxy_mode() is not None) or any(map(is_fake, state))


def is_fake(x: Any) -> bool:
    """Whether it is a tensor without numbers, of torch.export or another tracer."""
    return hasattr(x, "fake_mode")


def has_memory(x: Tensor) -> bool:
    """Whether kernels can read x. A tensor that wraps others has no address."""
    try:
        return x.data_ptr() != 0 or x.numel() == 0
    except RuntimeError:
        return False


def dense(g: Tensor | None, like: Tensor) -> Tensor:
    """A gradient as kernels can read it. Some are sparse, and it is None if f does not use a part of the state."""
    if g is None or g._is_zerotensor():
        return torch.zeros_like(like)
    g = g if g.layout is torch.strided else g.to_dense()
    try:
        address = g.data_ptr()
    except RuntimeError:
        address = 0
    if address or not g.numel():
        return g
    raise RuntimeError(
        f"a gradient of a solve is a {type(g).__name__} without memory of its own, which wraps other tensors or is "
        "batched (is_grads_batched, vmap): call autograd.grad once for each, with plain tensors"
    )


def _problem(x: Tensor) -> str | None:
    """Why kernels cannot read x. Operations with tensors of a tracer, which have no numbers, are recorded instead."""
    if is_fake(x):
        return None
    if x.dtype not in DTYPES:
        return f"{x.dtype}: it must be float32, float64, bfloat16 or float16"
    if x.is_nested or x.layout != torch.strided:
        return f"a tensor of layout {x.layout}: it must be dense"
    if forward_ad.unpack_dual(x).tangent is not None:
        return "a dual tensor, but a solve has no forward-mode derivative: use reverse mode"
    if not has_memory(x):
        kind = f"a {type(x).__name__} without memory of its own, which wraps other tensors (of torch.func, for example)"
        return f"{kind}: it must be a plain tensor; call solve outside of torch.func, with autograd and a batch"
    return None
