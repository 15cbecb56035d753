"""gradient="implicit": the gradient of the fixed point, by the implicit function theorem, with the same iteration.

At z = f(z, x), a loss with gradient g with respect to z has gradient u df/dx with respect to x, where u solves

    u = J^T u + g        J = df/dz

J^T has the eigenvalues of J, so the beta and gamma that converge fastest in the forward pass do so here. The graph of
the last evaluation of f is stored, and all products use it.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_structure

from ..kernels.half_step import wide
from .iteration import Iteration, graph_is_kept, relative_change, uncompiled
from .precision import precision_for
from .repeatable import Repeatable
from .state import State, dense


def with_implicit_gradient(iteration: Iteration, y: State, z: State) -> tuple[State, State]:
    """The last y and z, as functions of what f depends on."""
    (given, outputs), iteration.last = iteration.last, ()
    results = FixedPoint.apply(iteration, given, [*y, *z], *outputs)
    return list(results[: len(y)]), list(results[len(y) :])


class FixedPoint(torch.autograd.Function):
    """The last y and z, treated as the fixed point, as functions of the last output of f."""

    @staticmethod
    def forward(ctx: Any, iteration: Iteration, given: State, values: State, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.iteration, ctx.given, ctx.dtypes = iteration, given, [x.dtype for x in outputs]
        ctx.edges = [(i, get_gradient_edge(x)) for i, x in enumerate(outputs) if x.requires_grad]
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in values)

    @uncompiled
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        iteration, given, size = ctx.iteration, ctx.given, len(ctx.given)
        if torch.is_grad_enabled():
            raise RuntimeError("revdeq.solve has no second derivative: call backward without create_graph=True")
        # y and z are the same fixed point, so their gradients add up.
        dtypes = [wide(x.dtype) for x in given]
        both = [dense(g, x) for g, x in zip(grads, [*given, *given], strict=True)]
        by_y, by_z = both[:size], both[size:]
        g = [y.to(dtype) + z.to(dtype) for y, z, dtype in zip(by_y, by_z, dtypes, strict=True)]

        def mapped(u: State) -> State:
            seeds = [u[i].to(ctx.dtypes[i], copy=True) for i, _ in ctx.edges]  # a hook in f may modify them
            edges = [edge for _, edge in ctx.edges]
            products = torch.autograd.grad(edges, given, seeds, retain_graph=True, allow_unused=True)
            return [torch.add(x, v) for x, v in zip(g, map(dense, products, u), strict=True)]

        # The same iteration, without a graph. No step is inverted, so the states are float64.
        options = replace(iteration.options, gradient="exact", check=None, state="float64", indexed=False)
        f = Repeatable(mapped, g, tree_structure(g))
        adjoint = Iteration(f, g, g, precision_for(options, g[0].device), options, None)
        norm = torch.stack([x.norm() for x in g]).norm()
        u = g
        with torch.no_grad():
            try:
                for _, u, _ in adjoint.run(g, g):  # noqa: B007
                    pass
            except FloatingPointError:
                if norm.isfinite():
                    raise
                u = g  # the infinite gradient of a scaled loss is up to its GradScaler
        if adjoint.steps:
            iteration.statistics.steps, iteration.statistics.change = adjoint.steps, relative_change(adjoint.norms)
            if iteration.check is not None:
                iteration.check.judge_adjoint(iteration.statistics.change, norm)
        if not graph_is_kept():
            iteration.half_steps = ()
            iteration.end_pass()
        return None, None, None, *(x.to(dtype) for x, dtype in zip(u, ctx.dtypes, strict=True))
