"""The reversible iteration as a part of autograd's graph.

From y_0 = z_0 and with a = 1 - beta, b = beta gamma, c = beta (1 - gamma) (equation 5 of the paper, where gamma = 1):

    y_{n+1} = a y_n + b f(z_n) + c z_n        z_{n+1} = a z_n + b f(y_{n+1}) + c y_{n+1}

Half-step k, and evaluation k of f, update y if k is even and z if it is odd. Autograd records all of it, except for the
tensors that f saves (evaluation.py). In the backward pass its engine walks the graph; at the node of half-step k, the
half-step after it is inverted and f is evaluated again (adjoint.py), and the engine continues through the graph of f to
everything that f depends on.
"""

import collections
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .adjoint import BackwardPass
from .check import Check, Statistics
from .evaluation import MODIFIED, Evaluation
from .options import Options
from .precision import Float64
from .repeatable import Repeatable, thread
from .state import State

NORM_FLOOR = 1e-5
"""Added to the norm of the state in the relative change, which is then defined at zero."""


def relative_change(norms: Tensor) -> Tensor:
    """‖z_{n+1} - z_n‖ / (‖z_{n+1}‖ + 1e-5), from squared norms."""
    change, value = norms.sqrt()
    return change / (value + NORM_FLOOR)


class Iteration:
    """One solve: the states y and z, and what the backward pass needs to invert their steps. It refers to no graph.

    half_steps: those of y and z, each with its state, until a backward pass uses them up. steps: the number of steps
    taken. norms: the squared 2-norms of the last change of z and of z. converged: whether tol was reached. last: the
    input and output of the last evaluation, if the iteration has no graph.
    """

    norms: Tensor
    converged: Any = None
    last: Any = ()
    Backward: type[BackwardPass] = BackwardPass

    def __init__(
        self, f: Repeatable, z0: State, y0: State, precision: Float64, options: Options, check: Check | None
    ) -> None:
        self.f, self.precision, self.options, self.check = f, precision, options, check
        self.z0 = [x.detach() for x in z0]
        self.y0 = self.z0 if y0 is z0 else [x.detach() for x in y0]
        self.has_graph = torch.is_grad_enabled() and options.gradient == "exact"
        self.steps, self.is_running = 0, True
        self.half_steps: tuple[list[Any], ...] = ()
        self.statistics = Statistics()
        given = (*self.z0, *self.y0, *(x for x in f.args if isinstance(x, Tensor)))
        self._constants = [(x, x._version) for x in given if not x.is_inference()]  # until the backward pass
        self._kept = collections.deque[Evaluation]()
        self._pass: BackwardPass | None = None
        self._number = -1  # torch's id of the latest backward pass: they count up

    # Forward

    def run(self, z: State, y: State, stepwise: bool = False) -> Iterator[tuple[State, State, Any]]:
        """Take step by step, from z0 and y0 as parts of the graph. Yield y, z and aux as parts of the graph."""
        tol, count, aux = self.options.tol, self.options.max_steps, None
        try:
            while self.steps < count and not self._has_arrived():
                k = 2 * self.steps
                y = self._half_step(k, z, y, norms=False)
                if self.options.aux:
                    aux = self._with_aux(None if stepwise else aux)
                z = self._half_step(k + 1, y, z, norms=stepwise or k + 2 == 2 * count or tol is not None)
                if self.options.aux:
                    aux = self._with_aux(aux)
                self.steps += 1
                if tol is not None:
                    self.converged = self._is_close(tol)
                yield y, z, aux
            if tol is None:
                self.precision.check(self.half_steps, self.steps)
                if self.norms.is_cpu and not math.isfinite(sum(self.norms.tolist())):
                    raise self._not_finite()
        finally:
            self.is_running = False
            self._kept.clear()  # they refer to this object

    def _half_step(self, k: int, read: State, own: State, norms: bool) -> State:
        """Half-step k, of the state `own`, with f at the state `read`."""
        if not self.has_graph:
            return self._without_graph(k, read, norms)
        evaluation = Evaluation(k, self)
        if self.f.autocasts:
            torch.clear_autocast_cache()  # a cast shared by evaluations would sum their gradients in its precision
        outputs = evaluation.run(self.f, read)
        if k < 2:
            self._constants += evaluation.leaves()
        if not self.options.keep:
            evaluation.clear()
        else:
            evaluation.keep(outputs)
            self._kept.append(evaluation)
            if len(self._kept) > self.options.keep:
                self._kept.popleft().drop()
        return list(half_step(self, evaluation, norms, len(read), *read, *outputs, *(own if k == 0 else ())))

    def _without_graph(self, k: int, read: State, norms: bool) -> State:
        """f runs in the caller's grad mode, because it may differentiate, or choose another algorithm without."""
        self.last, has_grad = (), torch.is_grad_enabled()
        given = [x.detach().requires_grad_(has_grad) for x in read]
        outputs = self.f(given, k)
        if has_grad:
            self.last = given, outputs
        with torch.no_grad():
            return self.advance(k, given, outputs, norms)

    def advance(self, k: int, read: Sequence[Tensor], outputs: Sequence[Tensor], norms: bool) -> State:
        """The numbers of half-step k. Return the state in the dtypes that f reads, in new memory, because f may keep
        what it is given."""
        if not self.half_steps:
            self._begin(outputs)
        copies, partial = [], []
        for h, out, x in zip(self.half_steps[k % 2], outputs, read, strict=True):
            copies.append(torch.empty_like(x) if k else torch.empty_like(h.state, dtype=x.dtype))
            if norms:
                partial.append(h.relax_norms(out, x, copies[-1]).sum((1, 2)))
            else:
                h.relax(out, x, copies[-1])
        if norms:
            self.norms = partial[0] if len(partial) == 1 else torch.stack(partial).sum(0)
        return copies

    def _begin(self, outputs: Sequence[Tensor]) -> None:
        """Create the states, with the memory layout of f's outputs: another would cost a pass over memory every time.
        A mask is drawn in the order of the memory, so that an f that draws must always see the layout of z0."""
        like = self.z0 if self.f.draws else outputs
        self.half_steps = tuple(
            [self.precision.half_step(x, out) for x, out in zip(start, like, strict=True)]
            for start in (self.y0, self.z0)
        )

    def result_of(self, k: int, state: State) -> State:
        """The result of half-step k as the caller gets it."""
        return list(result(self, k, *state)) if self.has_graph else state

    def _with_aux(self, before: Any) -> Any:
        """Earlier auxiliary outputs and that of the last evaluation."""
        aux, self.f.aux = self.f.aux, None  # it refers to the graph, and the graph to this object
        if self.options.aux == "list":
            return [*(before or ()), aux]
        return aux if before is None else tree_map(torch.add, before, aux)

    def _has_arrived(self) -> bool:
        return bool(self.converged)

    def _is_close(self, tol: float) -> Any:
        return bool(relative_change(self._arrived_norms().double()) <= tol)

    def _arrived_norms(self) -> Tensor:
        """The norms after a step, on the host: the only wait for the device."""
        norms = self.norms.cpu()
        self.precision.check(self.half_steps, self.steps)
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

    def backward_pass(self) -> BackwardPass:
        """The running backward pass, or a new one from the last states."""
        number = current_pass()
        if self._pass is None or number != self._number:
            self._refuse(number)
            if self._pass is not None:
                self._pass.evaluation.clear()  # it went to no input of the first evaluation
            half_steps = self.half_steps
            if graph_is_kept() or self.is_running:
                half_steps = tuple([h.duplicate() for h in each] for each in half_steps)
            else:
                self.half_steps = ()
            self._pass, self._number = self.Backward(self, half_steps), number
        return self._pass

    def end_pass(self) -> None:
        self._pass = None
        if not self.half_steps:
            del self.f  # free what it captures: there will be no other backward pass

    def _refuse(self, number: int) -> None:
        """Raise if there is no backward pass that is that of the forward pass."""
        changed = [x for x, version in self._constants if x._version != version]
        for is_wrong, text in (
            (number < self._number, "a backward pass through a solve ran inside another one through the same solve"),
            (torch.is_inference_mode_enabled(), "f has no graph in inference mode: leave torch.inference_mode()"),
            (torch.is_grad_enabled(), "revdeq.solve has no second derivative: call backward without create_graph=True, "
             "or differentiate revdeq.baselines.stored_graph"),
            (thread.evaluates and self.is_running, "f differentiates through earlier evaluations of its solve: detach "
             "what it differentiates"),
            (not self.half_steps, "Trying to backward through a solve a second time, but its states were used up: call "
             "the first backward with retain_graph=True"),
            (changed, f"{MODIFIED}: z0, or a tensor that f uses, of shape {[tuple(x.shape) for x in changed]}, was "
             "changed between the forward and the backward pass (by an optimizer step?), so the gradient would be that "
             "of another f"),
        ):  # fmt: skip
            if is_wrong:
                raise RuntimeError(text)


# The private names of torch that revdeq uses, because no public one says it: the number of the running backward pass,
# as in torch.utils.checkpoint, and whether it has retain_graph=True, as in AOTAutograd.
current_pass = torch._C._current_graph_task_id
graph_is_kept = torch._C._autograd._get_current_graph_task_keep_graph


def uncompiled(backward: Callable[..., Any]) -> Any:
    """Decorator of the backward pass of a node: a compiled training step, too, repeats f as it ran, uncompiled."""

    def run(ctx: Any, *grads: Tensor | None) -> Any:
        compiles = torch.compiler.is_dynamo_compiling()
        return (torch.compiler.disable(backward) if compiles else backward)(ctx, *grads)

    return staticmethod(run)


class HalfStepNode(torch.autograd.Function):
    """Half-step k in the graph. What f read is among its inputs, so that the engine visits the nodes in order, whatever
    f depends on; but the adjoints are beside the graph, and no gradient flows there, except to z0."""

    @staticmethod
    def forward(
        ctx: Any, iteration: Iteration, evaluation: Evaluation, norms: bool, size: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.iteration, ctx.evaluation = iteration, evaluation
        ctx.set_materialize_grads(False)
        return tuple(iteration.advance(evaluation.k, tensors[:size], tensors[size : 2 * size], norms))

    @uncompiled
    def backward(ctx: Any, *products: Tensor | None) -> tuple[Any, ...]:
        iteration, evaluation, size = ctx.iteration, ctx.evaluation, len(products)
        now = iteration.backward_pass()
        seeds = now.at_half_step(evaluation, products)
        if evaluation.k:
            return *[None] * (4 + size), *seeds
        needs, by_z0, by_y0 = ctx.needs_input_grad[4:], [None] * size, [None] * size
        if now.adjoints is not None:
            if any((*needs[:size], *needs[2 * size :])):
                by_z0, by_y0 = now.by_initial()
            if not iteration.half_steps:
                ctx.evaluation = None  # its tensors are freed with the nodes of f that need them
            iteration.end_pass()
        return None, None, None, None, *by_z0, *seeds, *by_y0


class ResultNode(torch.autograd.Function):
    """The result of half-step k as the caller gets it. The gradient of a loss enters here, beside that which comes
    through later evaluations of f: added to it, it would be rounded to the dtype of z0. The last z needs no such
    node."""

    @staticmethod
    def forward(ctx: Any, iteration: Iteration, k: int, *states: Tensor) -> tuple[Tensor, ...]:
        ctx.iteration, ctx.k = iteration, k
        ctx.set_materialize_grads(False)
        return tuple([x.detach() for x in states])

    @uncompiled
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.iteration.backward_pass().enter(ctx.k, grads)
        return None, None, *(None if g is None else torch.zeros_like(g) for g in grads)  # f may have hooks there


half_step = super(torch.autograd.Function, HalfStepNode).apply
result = super(torch.autograd.Function, ResultNode).apply
"""Without checks for torch.func transforms, which do not apply here and take 7 us."""
