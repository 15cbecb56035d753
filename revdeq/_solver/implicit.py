"""gradient="implicit": the gradient of the fixed point, by the implicit function theorem, with the same iteration.

At z = f(z, x), a loss with gradient g with respect to z has gradient u df/dx with respect to x, where u solves

    u = J^T u + g        J = df/dz

J^T has the eigenvalues of J, so the beta and gamma that converge fastest in the forward pass do so here. f is evaluated
once more at the input of its last evaluation, and all products use that graph.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from .call import as_before
from .nodes import backward, refuse_other_derivatives
from .norms import norm
from .places import Filled
from .private import graph_is_kept, not_refusing_to_overwrite
from .scheme import relax, relax_norms
from .state import State, dense
from .tape import Tape
from .way_back import scaled


class Implicit(torch.autograd.Function):
    """The last y and z, treated as the fixed point, as functions of the last output of f."""

    @staticmethod
    def forward(ctx: Any, tape: Tape, values: State, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.tape, ctx.size = tape, len(outputs)
        # Chosen now, because the backward pass may run in a thread outside of `with backend(...)`.
        ctx.half_step = kernels.half_step_for(outputs[0].device, "float64")
        assert tape.last is not None
        ctx.home, ctx.k, ctx.given, ctx.outputs = tape.last
        tape.last = None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(x.detach() for x in ctx.given), *(x.detach() for x in outputs))
        return tuple(values)

    @backward
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        refuse_other_derivatives(grads)
        tape, size = ctx.tape, ctx.size
        tape.refuse_changes()
        saved = ctx.saved_tensors  # a checkpoint around the solve allows to read them once
        read, before = saved[:size], saved[size:]
        # y and z are the same fixed point, so their gradients add up.
        by_y, by_z = (
            [scaled(g, 1, x) for g, x in zip(part, read, strict=True)] for part in (grads[:size], grads[size:])
        )
        seeds = [y.add_(z) for y, z in zip(by_y, by_z, strict=True)]
        tape.places.needs_versions = True  # the saved tensors are read several times
        now = tape.places.again(ctx.home, ctx.k, tape.f, read, as_before(tape.f, tape.places.leaves))
        if tape.monitor is not None:
            tape.monitor.judge_same(now, before)
        u = _solved(ctx, seeds)
        if tape.monitor is not None:
            tape.monitor.judge_convergence(tape.adjoint.change, norm(seeds))
        if not graph_is_kept():
            del tape.f  # free what it captures: there will be no other backward pass
        return (None, None, *(x.to(out.dtype) for x, out in zip(u, now, strict=True)))


def _solved(ctx: Any, seeds: State) -> State:
    """Solve for u by the same half-steps, starting from g. No step is inverted, so the states are float64."""
    adjoint, scheme, options = ctx.tape.adjoint, ctx.tape.scheme, ctx.tape.options
    y_copy, z_copy = [[g.clone() for g in seeds] for _ in range(2)]
    relax_y, relax_z = [
        [ctx.half_step(g.to(torch.float64, copy=True), c) for g, c in zip(seeds, copy, strict=True)]
        for copy in (y_copy, z_copy)
    ]
    sources = [i for i, x in enumerate(ctx.outputs) if x.requires_grad]
    product = _Product(ctx.tape.places.filled[ctx.k])

    def mapped(u: State) -> State:
        outputs = [ctx.outputs[i] for i in sources]
        # Copies, because a hook in f may modify its gradient in place.
        given = [u[i].to(x.dtype, copy=True) for i, x in zip(sources, outputs, strict=True)]
        return [torch.add(g, v) for g, v in zip(seeds, dense(product(outputs, ctx.given, given), u), strict=True)]

    adjoint.steps = 0
    while True:
        step, next_step = scheme.at(2 * adjoint.steps), scheme.at(2 * adjoint.steps + 1)
        adjoint.steps += 1
        relax(relax_y, mapped(z_copy), z_copy, step)
        last = adjoint.steps == options.max_steps
        if not last and options.tol is None:
            relax(relax_z, mapped(y_copy), y_copy, next_step)
            continue
        change, value = relax_norms(relax_z, mapped(y_copy), y_copy, next_step).sqrt()
        adjoint.change = change / value.clamp(min=torch.finfo(value.dtype).tiny)
        if last or options.tol is None or not options.tol < adjoint.change.item() < math.inf:  # also if it is NaN
            return z_copy


class _Product:
    """Vector-Jacobian products through one evaluation of f, which saved the given tensors."""

    def __init__(self, filled: Filled) -> None:
        self._filled = filled
        self._around: Callable[[], Any] = contextlib.nullcontext

    def __call__(self, outputs: State, inputs: State, given: State) -> tuple[Tensor | None, ...]:
        try:
            with self._around():
                return torch.autograd.grad(outputs, inputs, given, retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            if "donated buffer" not in str(error) or self._around == self._copied:
                raise
        self._around = self._copied
        return self(outputs, inputs, given)

    @contextlib.contextmanager
    def _copied(self) -> Iterator[None]:
        """A compiled f overwrites the tensors that it saved, and therefore refuses a second product: it gets copies."""
        filled = self._filled
        saved, versions = filled.tensors, filled.versions
        copies = [x.clone() if isinstance(x, Tensor) and not x.requires_grad else x for x in saved]
        filled.tensors, filled.versions = copies, None
        try:
            with not_refusing_to_overwrite():
                yield
        finally:
            filled.tensors, filled.versions = saved, versions
