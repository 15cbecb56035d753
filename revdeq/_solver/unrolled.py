"""The iteration as plain PyTorch operations, for tracers and as a stored graph.

It computes the same bits as a solve with a float64 state, without saving memory.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..kernels.half_step import Coefficients
from ..kernels.reference import relaxed
from .private import is_exporting
from .state import State


def unrolled(
    f: Callable[..., Any],
    z0: Any,
    args: tuple[Any, ...],
    steps: Sequence[Coefficients],
    around: Callable[..., State] = lambda half_step, *states: half_step(*states),
    y0: Any = None,
    indexed: bool = False,
) -> tuple[Any, Any, Any]:
    """The last y and z, and z before the last step. `steps` has the coefficients of every half-step, and `around` is
    called with each half-step and its states, to run it."""
    initial, spec = tree_flatten(z0)

    def read(state: State) -> State:
        return [s.to(x.dtype) for s, x in zip(state, initial, strict=True)]

    def half_step(k: int, state: State, other: State) -> State:
        given = read(other)
        out = f(tree_unflatten(given, spec), *args, **({"evaluation": k} if indexed else {}))
        return [relaxed(s, o, g, steps[k]) for s, o, g in zip(state, spec.flatten_up_to(out), given, strict=True)]

    z = before = [x.double() for x in initial]
    y = z if y0 is None else [x.double() for x in spec.flatten_up_to(y0)]
    for k in range(0, len(steps), 2):
        before = z
        y = around(functools.partial(half_step, k), y, z)
        z = around(functools.partial(half_step, k + 1), z, y)
    last = (tree_unflatten(read(state), spec) for state in (y, z, before))
    return tuple(last)


def is_traced() -> bool:
    """Whether operations are being recorded, by torch.export, torch.jit.trace, make_fx or an exporter based on them,
    which would miss our kernels."""
    if torch.jit.is_tracing() or is_exporting():  # type: ignore[attr-defined]
        return True
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return proxies is not None and proxies.get_proxy_mode() is not None


def in_compiled_model() -> bool:
    """Whether torch.compile is tracing this. (torch.export may use the same tracer.)"""
    return torch.compiler.is_dynamo_compiling() and not is_exporting()


def has_fakes(state: Any) -> bool:
    """Whether it contains a fake tensor of a tracer."""
    leaves = [state] if isinstance(state, Tensor) else tree_leaves(state)
    return any(hasattr(x, "fake_mode") for x in leaves)
