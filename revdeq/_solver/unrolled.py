"""The iteration as plain PyTorch operations: for tracers, inside the f of another solve, and as a stored graph.

It computes the same bits as a solve with a float64 state, without saving memory.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..kernels.reference import relaxed
from .iteration import relative_change
from .state import State, is_fake


def unrolled(
    f: Callable[[State, int], State],
    z0: State,
    y0: State,
    step: Any,
    max_steps: int,
    tol: float | None = None,
    around: Callable[..., State] = lambda half_step, *states: half_step(*states),
) -> tuple[State, State, Tensor, int]:
    """The last y and z, the squared norms of the last change of z and of z, and the number of steps. f(state, k) is
    evaluation k, and `around` is called with each half-step and its states, to run it."""

    def half_step(k: int, state: State, other: State) -> State:
        read = [s.to(x.dtype) for s, x in zip(other, z0, strict=True)]
        return [relaxed(s, out, x, step) for s, out, x in zip(state, f(read, k), read, strict=True)]

    y, z = [x.double() for x in y0], [x.double() for x in z0]
    norms, steps = torch.zeros(2), 0
    while steps < max_steps:
        before = z
        y = around(functools.partial(half_step, 2 * steps), y, z)
        z = around(functools.partial(half_step, 2 * steps + 1), z, y)
        steps += 1
        norms = _norms(z, before)
        if tol is not None and relative_change(norms) <= tol:
            break
    y, z = ([s.to(x.dtype) for s, x in zip(state, z0, strict=True)] for state in (y, z))
    return y, z, norms, steps


def _norms(z: State, before: State) -> Tensor:
    state = [x.detach() for x in z]
    changes = [new - old.detach() for new, old in zip(state, before, strict=True)]
    return torch.stack([sum_of_squares(changes), sum_of_squares(state)])


def sum_of_squares(state: State) -> Tensor:
    """Of all numbers of a state, in float64."""
    return functools.reduce(torch.add, [x.double().square().sum() for x in state])


def is_traced(state: Any) -> bool:
    """Whether operations are being recorded, by torch.export, torch.jit.trace, make_fx or an exporter based on them,
    which would miss our kernels."""
    if torch.jit.is_tracing() or torch.compiler.is_exporting():  # type: ignore[attr-defined]
        return True
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    if proxies is not None and proxies.get_proxy_mode() is not None:
        return True
    return any(map(is_fake, [state] if isinstance(state, Tensor) else tree_leaves(state)))


DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def refuse_dropout(modules: Any) -> None:
    """A tracer would record other random numbers for every evaluation."""
    if any(isinstance(m, DROPOUTS) and m.training and m.p > 0 for outer in modules for m in outer.modules()):
        raise RuntimeError(
            "f has dropout in training mode, and a traced or exported solve would draw another mask in every "
            "evaluation: call .eval() on the model first"
        )
