"""The gradient of the fixed point itself, by the implicit function theorem, with the same iteration.

At z = f(z, x), a loss with the gradient g by z has the gradient u df/dx by x, where u solves the adjoint equation

    u = J^T u + g        J = df/dz

J^T has the eigenvalues of J, so that the beta and gamma that converge fastest forward do so here. f is evaluated once,
at the last state, and its graph gives all of the products.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from .adjoint import (
    Iteration,
    Outcome,
    Totals,
    as_forward,
    dense,
    graph_is_kept,
    refuse_unsupported,
    relax,
    relax_norms,
    scaled,
)
from .inputs import State
from .replay import Linearisation, Replay


@dataclass
class Adjoint:
    """What the backward pass of gradient="implicit" did.

    Attributes:
        steps: The number of steps it took, each with two products; None before it ran.
        residual: The relative change of u in the last of them, a 0-d tensor.
    """

    steps: int | None = None
    residual: Tensor | None = None


class Implicit(torch.autograd.Function):
    """The last y and z as functions of f's inputs, as if they were the fixed point."""

    @staticmethod
    def forward(ctx: Any, it: Iteration, outcome: Outcome, adjoint: Adjoint, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.it, ctx.adjoint, ctx.size = it, adjoint, len(outcome.z)
        # Chosen here: a backward pass may run in a thread that does not see `with backend(...)`.
        ctx.half_step = kernels.half_step_for(outcome.z[0].device, "float64")
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*outcome.z_copy, *inputs)
        return (*outcome.y_copy, *outcome.z_copy)

    @staticmethod
    @as_forward
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_unsupported(grads)
        it, size = ctx.it, ctx.size
        z = [x.detach() for x in ctx.saved_tensors[:size]]  # before anything that a first backward pass releases
        inputs = it.f.inputs.tensors
        # y and z are the same fixed point, and so their gradients add up.
        by_y, by_z = ([scaled(g, 1, x) for g, x in zip(part, z, strict=True)] for part in (grads[:size], grads[size:]))
        seeds = [y.add_(z) for y, z in zip(by_y, by_z, strict=True)]
        totals = Totals(inputs)
        replay = Replay(it.f)
        with replay.running():
            linear = replay.linearise([x.clone() for x in z])
            if it.monitor is not None:
                assert it.norms is not None
                it.monitor.judge_repetition(linear.distance(), it.norms, it.scheme.step.b, z[0].dtype)
            totals.add(linear.by_inputs(_solved(it, ctx.half_step, linear, seeds, ctx.adjoint)))
        input_grads = it.f.shards.deliver(inputs, totals.rounded())
        if it.monitor is not None:
            it.monitor.judge_convergence(ctx.adjoint.residual)
        if not graph_is_kept():
            it.f.release()
        return (None, None, None, *input_grads)


def _solved(it: Iteration, half_step: Any, linear: Linearisation, seeds: State, adjoint: Adjoint) -> State:
    """u, by the same half-steps as forward, from g. Nothing is undone, so that its states are float64."""
    step = it.scheme.step
    y_copy, z_copy = [[g.clone() for g in seeds] for _ in range(2)]
    relax_y, relax_z = [
        [half_step(g.to(torch.float64, copy=True), c) for g, c in zip(seeds, copy, strict=True)]
        for copy in (y_copy, z_copy)
    ]

    def mapped(u: State) -> State:
        return [torch.add(g, v) for g, v in zip(seeds, dense(linear.by_state(u), u), strict=True)]

    adjoint.steps = 0
    while True:
        adjoint.steps += 1
        relax(relax_y, mapped(z_copy), z_copy, step)
        last = adjoint.steps == it.options.max_steps
        if not last and it.options.tol is None:
            relax(relax_z, mapped(y_copy), y_copy, step)
            continue
        change, value = relax_norms(relax_z, mapped(y_copy), y_copy, step).sqrt()
        adjoint.residual = change / value.clamp(min=torch.finfo(value.dtype).tiny)
        if last or (it.options.tol is not None and _has_arrived(adjoint.residual, it.options.tol)):
            return z_copy


def _has_arrived(residual: Tensor, tol: float) -> bool:
    value = residual.item()
    return value <= tol or not math.isfinite(value)
