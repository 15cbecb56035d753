"""The iteration as plain PyTorch operations: for tracers, inside the f of another solve, and as a stored graph.

It computes the same bits as a solve with a float64 state, without saving memory.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.reference import relaxed
from .iteration import relative_change
from .options import Options
from .repeatable import Repeatable, modules_of, thread
from .state import State


def unrolled(
    f: Callable[[State, int], State],
    z0: State,
    y0: State,
    step: Any,
    options: Options,
    around: Callable[..., State] = lambda half_step, *states: half_step(*states),
) -> tuple[State, State, int, Tensor]:
    """The last y and z, the number of steps, and the squared norms of the last change of z and of z. f(state, k) is
    evaluation k, and `around` is called with each half-step and its states, to run it."""

    def half_step(k: int, state: State, other: State) -> State:
        read = [s.to(x.dtype) for s, x in zip(other, z0, strict=True)]
        return [relaxed(s, out, x, step) for s, out, x in zip(state, f(read, k), read, strict=True)]

    y, z = [x.double() for x in y0], [x.double() for x in z0]
    norms, steps = torch.zeros(2), 0
    while steps < options.max_steps and (steps == 0 or options.tol is None or relative_change(norms) > options.tol):
        before = z
        y = around(functools.partial(half_step, 2 * steps), y, z)
        z = around(functools.partial(half_step, 2 * steps + 1), z, y)
        steps += 1
        if options.tol is not None or steps == options.max_steps:
            changes = [new.detach() - old.detach() for new, old in zip(z, before, strict=True)]
            norms = torch.stack([sum_of_squares(changes), sum_of_squares([x.detach() for x in z])])
    y, z = ([s.to(x.dtype) for s, x in zip(state, z0, strict=True)] for state in (y, z))
    return y, z, steps, norms


def sum_of_squares(state: Iterable[Tensor]) -> Tensor:
    """Of all numbers of a state, in float64."""
    return functools.reduce(torch.add, [x.double().square().sum() for x in state])


def unrollable(f: Any, z: State, spec: Any, args: Any, kwargs: Any, options: Options) -> Repeatable:
    """f for an unrolled solve in a tracer, which cannot record our kernels, or inside the f of another solve, where all
    must be plain operations."""
    is_traced = not thread.evaluates
    for name, refused in (
        ("per_example", options.per_example),
        ("aux", options.aux),
        ("gradient", options.gradient == "implicit"),
        ("tol", is_traced and options.tol),
    ):
        if refused:
            value = getattr(options, name)
            raise ValueError(f"{name} = {value!r} does not work in a traced model or inside the f of a solve")
    if is_traced and any(_drops(m) for outer in modules_of(f) for m in outer.modules()):
        raise RuntimeError(
            "f has dropout in training mode, and a traced or exported solve would draw another mask in every "
            "evaluation: call .eval() on the model first"
        )
    return Repeatable(f, z, spec, args, kwargs, options.indexed, is_traced=is_traced)


DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def _drops(module: nn.Module) -> bool:
    return isinstance(module, DROPOUTS) and module.training and module.p > 0
