"""The iteration as plain PyTorch operations: for tracers, inside the f of another solve, and as a stored graph.

It computes the same bits as a solve with a float64 state, without saving memory.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..kernels.half_step import Coefficients
from ..kernels.reference import relaxed
from .iteration import relative_change
from .state import State


def unrolled(
    f: Callable[..., Any],
    z0: Any,
    args: tuple[Any, ...],
    steps: Sequence[Coefficients],
    around: Callable[..., State] = lambda half_step, *states: half_step(*states),
    y0: Any = None,
    indexed: bool = False,
    tol: float | None = None,
) -> tuple[Any, Any, Tensor, int]:
    """The last y and z, the squared norms of the last change of z and of z, and the number of steps. `steps` has the
    coefficients of every half-step, and `around` is called with each half-step and its states, to run it."""
    initial, spec = tree_flatten(z0)

    def read(state: State) -> State:
        return [s.to(x.dtype) for s, x in zip(state, initial, strict=True)]

    def half_step(k: int, state: State, other: State) -> State:
        given = read(other)
        out = f(tree_unflatten(given, spec), *args, **({"evaluation": k} if indexed else {}))
        return [relaxed(s, o, g, steps[k]) for s, o, g in zip(state, spec.flatten_up_to(out), given, strict=True)]

    z = before = [x.double() for x in initial]
    y = z if y0 is None else [x.double() for x in spec.flatten_up_to(y0)]
    k = 0
    while k < len(steps):
        before = z
        y = around(functools.partial(half_step, k), y, z)
        z = around(functools.partial(half_step, k + 1), z, y)
        k += 2
        if tol is not None and relative_change(_norms(z, before)) <= tol:
            break
    return tree_unflatten(read(y), spec), tree_unflatten(read(z), spec), _norms(z, before), k // 2


def inner(xs: State, ys: State) -> Tensor:
    """The inner product of two states, in float64."""
    return functools.reduce(torch.add, [(x.double() * y.double()).sum() for x, y in zip(xs, ys, strict=True)])


def _norms(z: State, before: State) -> Tensor:
    state = [x.detach() for x in z]
    changes = [new - old.detach() for new, old in zip(state, before, strict=True)]
    return torch.stack([inner(changes, changes), inner(state, state)])


# Tracers


def is_exporting() -> bool:
    """Whether torch.export is tracing. torch.compiler.is_exporting, the fallback, is always True where torch.compile
    traces it, before torch 2.13."""
    compiler: Any = torch.compiler
    return compiler._is_exporting_flag if hasattr(compiler, "_is_exporting_flag") else compiler.is_exporting()


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


def undrawn(f: Callable[..., Any]) -> Callable[..., Any]:
    """f for a tracer, which would record other random numbers for every evaluation: raises if f drops out."""
    for module in f.modules() if isinstance(f, nn.Module) else ():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
            raise RuntimeError(
                "f has dropout in training mode, and a traced or exported solve would draw another mask in every "
                "evaluation: call .eval() on the model first"
            )
    return f
