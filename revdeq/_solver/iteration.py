"""The reversible iteration as a part of autograd's graph.

From y_0 = z_0 and with a = 1 - beta, b = beta gamma and c = beta (1 - gamma) (equation 5 of the paper, where gamma = 1):

    y_{n+1} = a y_n + b f(z_n) + c z_n        z_{n+1} = a z_n + b f(y_{n+1}) + c y_{n+1}

Half-step k, and evaluation k of f, update y if k is even and z if it is odd. Autograd records all of it, except for the
tensors that f saves (evaluation.py). In the backward pass its engine walks the graph; at the node of half-step k, the
half-step after it is inverted and f is evaluated again (adjoint.py), and the engine continues through the graph of f to
everything that f depends on.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .. import _device
from .adjoint import BackwardPass
from .check import Check, Statistics
from .evaluation import Evaluation
from .options import Options
from .precision import Float64
from .state import State, has_memory

NORM_FLOOR = 1e-5
"""Added to the norm of the state in the relative change, which is then defined at zero."""


def relative_change(norms: Tensor) -> Tensor:
    """‖z_{n+1} - z_n‖ / (‖z_{n+1}‖ + 1e-5), from squared norms."""
    change, value = norms.sqrt()
    return change / (value + NORM_FLOOR)


class Iteration:
    """One solve: the states y and z, and what the backward pass needs to invert their steps. It refers to no graph.

    first: the half-step at which the graph begins. steps: the number of steps taken.
    norms: the squared 2-norms of the last change of z and of z.
    """

    norms: Tensor
    Backward = BackwardPass

    def __init__(
        self,
        f: Callable[[State, int], State],
        z0: State,
        y0: State,
        precision: Float64,
        options: Options,
        check: Check | None,
    ) -> None:
        self.f: Any = f
        self.precision, self.options, self.check = precision, options, check
        self.z0, self.y0 = [x.detach() for x in z0], [x.detach() for x in y0]
        steps = options.max_steps
        exact_steps = 0 if options.gradient == "implicit" else min(steps, options.backward_steps or steps)
        self.first = 2 * (steps - exact_steps) if torch.is_grad_enabled() else 2 * steps
        self.steps, self.is_running = 0, True
        self.statistics = Statistics()
        states = list(map(precision.encoded, self.z0))
        others = [x.duplicate() for x in states] if y0 is z0 else list(map(precision.encoded, self.y0))
        self.half_steps: tuple[list[Any], ...] = (others, states)
        self._constants = [(x, x._version) for x in (*z0, *y0) if not x.is_inference()]  # until the backward pass
        self._pass: BackwardPass | None = None

    # Forward

    def run(self, z: State, y: State, stepwise: bool = False) -> Iterator[tuple[State, State, Any]]:
        """Take step by step, from z0 and y0 as parts of the graph. Yields y, z and aux as parts of the graph."""
        tol, kept, aux = self.options.tol, collections.deque[Evaluation](), None
        try:
            while self.steps < self.options.max_steps:
                k, last = 2 * self.steps, self.steps == self.options.max_steps - 1
                y = self._half_step(k, z, y, kept, norms=False)
                aux = self._with_aux(None if stepwise else aux)
                z = self._half_step(k + 1, y, z, kept, norms=stepwise or last or tol is not None)
                aux = self._with_aux(aux)
                self.steps += 1
                if has_arrived := tol is not None and self._is_close(tol):
                    self.is_running = False
                yield y, z, aux
                if has_arrived:
                    break
            if tol is None:
                self.precision.check([*self.half_steps[0], *self.half_steps[1]])
                if _device.can_look(self.norms) and not self.norms.isfinite().all():
                    raise self._not_finite()
        finally:
            self.is_running = False

    def _half_step(self, k: int, read: State, own: State, kept: Any, norms: bool) -> State:
        """Half-step k, of the state `own`, with f at the state `read`."""
        if k < self.first:
            with torch.no_grad():
                return self.advance(k, read, self.f(read, k), norms)
        evaluation = Evaluation(k, self)
        if self.f.autocasts:
            torch.clear_autocast_cache()  # a cast shared by evaluations would sum their gradients in its precision
        outputs = evaluation.run(self, read)
        if k == self.first:
            self._constants += evaluation.leaves()
        if self.options.keep:
            evaluation.keep(outputs)
            kept.append(evaluation)
            if len(kept) > self.options.keep:
                kept.popleft().discard()
        else:
            evaluation.discard()
        return list(half_step(self, evaluation, norms, len(read), *read, *outputs, *(own if k == 0 else ())))

    def advance(self, k: int, read: Sequence[Tensor], outputs: Sequence[Tensor], norms: bool) -> State:
        """The numbers of half-step k. Returns the state in the dtypes that f reads, in new memory, because f may keep
        what it is given."""
        half_steps, partial = self.half_steps[k % 2], []
        copies = [torch.empty_like(h.state, dtype=x.dtype) for h, x in zip(half_steps, self.z0, strict=True)]
        for half_step, out, x, copy in zip(half_steps, outputs, read, copies, strict=True):
            if norms:
                partial.append(half_step.relax_norms(out, x, copy).sum((1, 2)))
            else:
                half_step.relax(out, x, copy)
        if norms:
            self.norms = partial[0] if len(partial) == 1 else torch.stack(partial).sum(0)
        return copies

    def _with_aux(self, before: Any) -> Any:
        """Earlier auxiliary outputs and that of the last evaluation."""
        if not self.options.aux:
            return None
        aux, self.f.aux = self.f.aux, None  # it refers to the graph, and the graph to this object
        if self.options.aux == "list":
            return [*(before or ()), aux]
        return aux if before is None else tree_map(torch.add, before, aux)

    def _is_close(self, tol: float) -> bool:
        return bool(relative_change(self._arrived_norms().double()) <= tol)

    def _arrived_norms(self) -> Tensor:
        """The norms after a step, on the host: the only wait for the device."""
        norms = self.norms.cpu()
        self.precision.check([*self.half_steps[0], *self.half_steps[1]])
        if not norms.isfinite().all():
            raise self._not_finite()
        return norms

    def _not_finite(self) -> FloatingPointError:
        if not all(x.isfinite().all() for x in (*self.z0, *self.y0)):
            return FloatingPointError("z0 is not finite: start from finite numbers")
        return FloatingPointError(
            f"the norm of the state is not finite after step {self.steps} of at most {self.options.max_steps} "
            f"(beta = {self.precision.step.beta:.6g}): f or an argument is not finite, or the iteration "
            "diverges; try a smaller beta, or an f that contracts"
        )

    def steps_taken(self) -> Any:
        return self.steps

    # Backward, called by the engine

    def backward_pass(self, grads: Sequence[Tensor | None] = ()) -> BackwardPass:
        """The running backward pass, or a new one from the last states."""
        number = torch._C._current_graph_task_id()
        if self._pass is not None and self._pass.number == number:
            return self._pass
        self._refuse(grads)
        is_kept = torch._C._autograd._get_current_graph_task_keep_graph()
        both = self.half_steps
        read = [h.decoded(x.dtype).requires_grad_() for h, x in zip(both[0], self.z0, strict=True)]  # as most are for f
        if is_kept or self.is_running:
            both = tuple([h.duplicate() for h in hs] for hs in both)
        else:
            self.half_steps = ([], [])
        self._pass = self.Backward(self, number, both, read)
        return self._pass

    def end_pass(self) -> None:
        self._pass = None
        if not self.half_steps[0]:
            del self.f  # free what it captures: there will be no other backward pass

    def _refuse(self, grads: Sequence[Tensor | None]) -> None:
        """Raise if there is no backward pass that is that of the forward pass."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "revdeq.solve has no second derivative: call backward without create_graph=True, or differentiate an "
                "unrolled iteration"
            )
        if not self.half_steps[0]:
            raise RuntimeError(
                "Trying to backward through a solve a second time, but its states were used up: call the first "
                "backward with retain_graph=True"
            )
        if not all(g is None or g.layout is not torch.strided or has_memory(g) for g in grads):
            raise RuntimeError("the gradients are batched (is_grads_batched, vmap): call autograd.grad once for each")
        for x, version in self._constants:
            if x._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"z0, or a tensor that f uses, of shape {tuple(x.shape)}, was changed between the forward and the "
                    "backward pass (by an optimizer step?), so the gradient would be that of a different f"
                )


class HalfStep(torch.autograd.Function):
    """Half-step k in the graph. What f read is among its inputs, so that the engine visits the nodes in order, whatever
    f depends on; but the adjoints are beside the graph, and no gradient flows there, except to z0."""

    @staticmethod
    def forward(
        ctx: Any, iteration: Iteration, evaluation: Evaluation, norms: bool, size: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.iteration, ctx.evaluation, ctx.rest = iteration, evaluation, len(tensors) - 2 * size
        ctx.set_materialize_grads(False)
        return tuple(iteration.advance(evaluation.k, tensors[:size], tensors[size : 2 * size], norms))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        now = ctx.iteration.backward_pass(grads)
        seeds = now.at_half_step(ctx.evaluation, grads)
        by_z0 = by_y0 = [None] * len(grads)
        if ctx.evaluation.k == ctx.iteration.first:
            size, needs = len(grads), ctx.needs_input_grad[4:]
            if ctx.rest and any((*needs[:size], *needs[2 * size :])):
                by_z0, by_y0 = now.by_initial()
            if not ctx.iteration.half_steps[0]:
                ctx.evaluation = None  # its tensors are freed with the nodes of f that need them
            ctx.iteration.end_pass()
        return None, None, None, None, *by_z0, *seeds, *by_y0[: ctx.rest]


half_step = super(torch.autograd.Function, HalfStep).apply
"""Without checks for torch.func transforms, which do not apply here and take 2 us."""
