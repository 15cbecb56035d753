"""The iteration as plain PyTorch operations, one after the other: what tracers record, and what autograd stores whole.

It has the bits of a solve with a float64 state, and no memory is saved.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..kernels.half_step import Coefficients
from ..kernels.reference import relaxed
from .state import State


def unrolled(
    f: Callable[..., Any],
    z0: Any,
    args: tuple[Any, ...],
    step: Coefficients,
    max_steps: int,
    around: Callable[..., State] = lambda half_step, *states: half_step(*states),
) -> tuple[Any, Any, Any]:
    """The last y and z, and z before the last step, shaped like z0. `around` is called with each half-step and its
    states, to run it."""
    initial, spec = tree_flatten(z0)

    def read(state: State) -> State:
        return [s.to(x.dtype) for s, x in zip(state, initial, strict=True)]

    def half_step(state: State, other: State) -> State:
        given = read(other)
        out = spec.flatten_up_to(f(tree_unflatten(given, spec), *args))
        return [relaxed(s, o, g, step) for s, o, g in zip(state, out, given, strict=True)]

    y = z = before = [x.double() for x in initial]
    for _ in range(max_steps):
        before = z
        y = around(half_step, y, z)
        z = around(half_step, z, y)
    last = (tree_unflatten(read(state), spec) for state in (y, z, before))
    return tuple(last)


def is_traced() -> bool:
    """Whether operations are being recorded, past which a kernel would write: by torch.export, torch.jit.trace, make_fx
    or an exporter that is built on them."""
    if torch.jit.is_tracing() or getattr(torch.compiler, "is_exporting", lambda: False)():  # type: ignore[attr-defined]
        return True
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return proxies is not None and proxies.get_proxy_mode() is not None


def has_fakes(state: Any) -> bool:
    """Whether there is a tensor in it with a shape and no memory, of a tracer's."""
    leaves = [state] if isinstance(state, Tensor) else tree_leaves(state)
    return any(hasattr(x, "fake_mode") for x in leaves)
