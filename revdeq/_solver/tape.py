"""The reversible iteration on autograd's own graph.

Forward, from y_0 = z_0 and with a = 1 - beta, b = beta gamma and c = beta (1 - gamma) (equation 5 of the paper, where
gamma = 1):

    y_{n+1} = a y_n + b f(z_n) + c z_n        z_{n+1} = a z_n + b f(y_{n+1}) + c y_{n+1}

Half-step k, and evaluation k of f, move y where k is even and z where it is odd, from 0 on. Autograd records all of it,
but for the tensors that f would save (places.py). Backward, its engine walks the graph. When it comes to the node of
half-step k, the half-step after it is undone, f is evaluated again where evaluation k was (way_back.py), and the engine
goes on through f by itself, to whatever f depends on.
"""

import collections
import contextlib
import functools
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _device
from ..kernels.backends import together
from .call import Call
from .context import OnceMore, untraced
from .monitor import Monitor
from .options import Options
from .places import Differentiates, Evaluation, Home, LeavingOut, Notes, Noting
from .private import current_pass, is_batched
from .scheme import Scheme
from .state import State, laid_out_like
from .way_back import WayBack

NORM_FLOOR = 1e-5
"""Added to the norm of the state in the relative change, so that a solution of zero can be reached."""

ANNOUNCED = 32
"""Steps that a solve with a tolerance is prepared for at first: it may be content long before `max_steps`."""


class Last(NamedTuple):
    """The last evaluation of f, with its graph."""

    evaluation: Evaluation
    given: State
    outputs: State


class Tape:
    """One solve: forward it steps y and z, and backward it undoes them as autograd asks.

    initial: y and z before the first step. steps: those that were taken.
    norms: the squared 2-norms of the last change of z and of z.
    first: the step where the way back ends, and `end` what f read of z there, if that is not the initial state.
    last: for an implicit gradient, where f depends on anything that needs one.
    """

    def __init__(self, f: Call, initial: State, scheme: Scheme, options: Options, monitor: Monitor | None) -> None:
        self.f, self.scheme, self.options, self.monitor = f, scheme, options, monitor
        self.initial = [x.detach() for x in initial]
        self._versions = [(weakref.ref(x), x._version) for x in initial if not x.is_inference()]
        self.steps = self.first = 0
        self.end: State = []
        self.norms: Tensor | None = None
        self.last: Last | None = None
        self.evaluating = False
        self.half_steps: tuple[list[Any], list[Any]] = ([], [])
        self._home: Home | None = Home(self)  # until the forward pass has ended: from then on the graph holds it
        self._evaluation: Evaluation | None = None  # the last one, likewise
        self._needed = self._stores = self._cuts = False
        self.notes = Notes()
        self._kept: collections.deque[Evaluation] = collections.deque()
        self._way_back: WayBack | None = None
        self._end: Callable[[], Any] = lambda: None
        self._lock = threading.RLock()

    # Forward

    def run(self, z0: State) -> tuple[State, State]:
        """The last y and z in the dtypes that f reads. Where divergence can be seen without waiting for the device, it
        is an error."""
        last = self._run(z0, look=self.options.tol is not None)
        if self.options.tol is None and _device.can_look(self.initial[0]):
            assert self.norms is not None
            if not math.isfinite(relative_change(*self.norms.tolist())):
                last = self._run(z0, look=True)  # once more, to say at which step
        self.f.end()
        y, z = last
        values = [x.detach() for x in (*y, *z)]
        if self._needed and self.options.gradient == "exact":
            values = list(_End.apply(self, self._home, values, *z))
        elif not self._needed:
            self.last = None
        self.half_steps, self._home, self._evaluation = ([], []), None, None
        self._kept.clear()
        return values[: len(y)], values[len(y) :]

    def _run(self, z0: State, look: bool) -> tuple[State, State]:
        """If `look`, test for convergence after each step (synchronises)."""
        options, graph = self.options, torch.is_grad_enabled()
        count = 2 * options.max_steps
        exact = graph and options.gradient == "exact"
        # With a tolerance nobody knows yet where the way back will end.
        undone = options.max_steps if options.tol is not None else options.backward_steps or options.max_steps
        self.steps, self.first = 0, options.max_steps - min(undone, options.max_steps) if exact else 0
        turn = 2 * self.first if exact else count
        self._cuts = exact and options.tol is not None and options.backward_steps is not None
        self._needed = exact and turn == 0 and any(x.requires_grad for x in z0)
        self._kept.clear()
        origin = torch.empty(0, device="cpu", requires_grad=True) if graph else None

        def given(k: int, read: State) -> State:
            """What f reads, in memory of its own. In grad mode it needs a gradient, whether or not z0 does."""
            if k > turn:
                return read
            if k == turn == 0:
                return list(_Begin.apply(self._home, origin, *z0))
            read = [x.clone() for x in read] if k == 0 else read
            return list(_Begin.apply(None, origin, *read)) if graph else read

        read = self.initial
        for k in range(count):
            may_be_last = k % 2 == 1 and (look or k == count - 1)
            record = k >= turn or (graph and may_be_last)
            if k == 0:
                f_reads, outputs = self._first(lambda: given(0, self.initial), record)
                self._bind(outputs)
            else:
                f_reads = given(k, read)
                outputs = self._evaluate(k, f_reads, record)
            before = read
            if k >= turn:
                read = list(_relax(self, self._home, self._evaluation, may_be_last, before, *outputs, *f_reads))
            else:
                assert self._evaluation is not None
                self.last = Last(self._evaluation, f_reads, outputs) if record else None
                read = self.step(k, [x.detach() for x in outputs], before, may_be_last)
            del outputs, f_reads
            if k % 2 == 0:
                continue
            self.steps += 1
            if look and self._has_arrived():
                break
            if self.steps == self.first:
                self.end = [x.clone() for x in read]
        if self._cuts:
            assert options.backward_steps is not None
            self.first = self.steps - min(options.backward_steps, self.steps)
        if not look:
            self.scheme.check([*self.half_steps[0], *self.half_steps[1]])
        if self.f.changes_its_input:  # the last y, too
            before = self.scheme.read([h.state for h in self.half_steps[0]], before)
        return before, read

    def _first(self, given: Callable[[], State], record: bool) -> tuple[State, State]:
        """What f read in the first evaluation, which may have to be repeated, and what it returned."""
        while True:
            f_reads = given()
            try:
                with self.f.first(self.options.tol is not None):
                    return f_reads, self._evaluate(0, f_reads, record)
            except OnceMore:
                continue
            except RuntimeError as error:
                if "saved tensor hooks" not in str(error) or self._stores:
                    raise
                self._stores = True  # torch.func inside f does not let us leave out anything: the graph is stored

    def _evaluate(self, k: int, read: State, record: bool) -> State:
        """f's outputs. With `record`, they are part of the graph, which the evaluation's tensors are left out of."""
        f, mixes = self.f, self.scheme.step.c != 0
        known = f.changes_its_input
        evaluation = Evaluation(self._home if record else None, k)
        keep = 0 if not record or evaluation.is_within_another else self.options.keep
        if record:
            torch.clear_autocast_cache()  # a cast that two evaluations share would sum their gradients in its precision

        def evaluated(notes: bool) -> State:
            given = [x.clone() for x in read] if known and mixes and k > 0 else read
            hooks: Any = Noting(evaluation, self.notes) if notes else LeavingOut(evaluation)
            with hooks if torch.is_grad_enabled() and not self._stores else contextlib.nullcontext():
                return f(given)

        self.evaluating = True
        try:
            outputs = evaluated(notes=k == 0 or keep > 0 or self._cuts or self.notes.needed)
        except Differentiates:
            self.notes.needed = True
            outputs = evaluated(notes=True)
        finally:
            self.evaluating = False
        if mixes and k > 0 and f.changes_its_input and not known:
            raise RuntimeError(
                "f changes its input in place, and did not in its first evaluation: let it do so always, or never"
            )
        self._evaluation = evaluation
        self._needed = self._needed or (record and _leads_to_a_leaf(outputs, read))
        if self._cuts:
            evaluation.note_shapes()
        if keep or self._stores:
            evaluation.values = [x.detach() for x in outputs]
        if keep and not self._stores:
            self._kept.append(evaluation)
            if len(self._kept) > keep:
                self._kept.popleft().empty()
        elif not self._stores:
            evaluation.empty()
        return outputs

    def _bind(self, outputs: State) -> None:
        """The half-steps, in the layout of f's outputs."""
        like, has_tolerance = laid_out_like(outputs, self.initial), self.options.tol is not None
        announced = min(self.options.max_steps, ANNOUNCED) if has_tolerance else self.options.max_steps
        y = self.scheme.start(self.initial, like)
        z = [x.clone() for x in y]
        self.half_steps = self.scheme.bind(y, like, announced), self.scheme.bind(z, like, announced)
        if not has_tolerance:
            self.scheme.make_room([*self.half_steps[0], *self.half_steps[1]])

    def step(self, k: int, outputs: State, read: State, norms: bool) -> State:
        """Half-step k: what f reads of the state that it moves, in new memory."""
        half_steps, step = self.half_steps[k % 2], self.scheme.step
        copies = []
        for half_step in half_steps:
            copy = torch.empty_like(half_step.copy)
            half_step.write_to(copy)
            copies.append(copy)
        if norms:
            self.norms = relax_norms(half_steps, outputs, read, step)
        else:
            relax(half_steps, outputs, read, step)
        return copies

    def _has_arrived(self) -> bool:
        assert self.norms is not None
        norms = self.scheme.look(self.norms, [*self.half_steps[0], *self.half_steps[1]], self.steps)
        residual = relative_change(*norms)
        if not math.isfinite(residual):
            if not all(x.isfinite().all() for x in self.initial):
                raise FloatingPointError("z0 is not finite: start from finite numbers")
            raise FloatingPointError(
                f"the norm of the state is not finite after step {self.steps} of at most {self.options.max_steps} "
                f"(beta = {self.scheme.beta:.6g}): f returns NaN or infinity, or the iteration diverges; try a smaller "
                "beta, or an f that contracts"
            )
        return self.options.tol is not None and residual <= self.options.tol

    # Backward, as the engine walks

    def turn(self, ctx: Any, grads: Sequence[Tensor | None]) -> None:
        """It comes to the end of the iteration, with gradients by the last y and z."""
        self._refuse_changes()
        self._way_back = WayBack(self, _states(ctx), grads)

    def back(self, evaluation: Evaluation, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """It comes to the half-step after an evaluation, with gradients by what f reads of the state that it moved.
        Returns those by what f returned."""
        with self._lock:
            return self._in_this_pass().undo(evaluation, grads)

    def reaches(self, evaluation: Evaluation) -> bool:
        """It comes to the inside of an evaluation whose tensors are not there. Whether any gradient flows there."""
        with self._lock:
            return self._in_this_pass().reach(evaluation)

    def arrive(self, grads: Sequence[Tensor | None], needed: bool) -> Sequence[Tensor | None]:
        """It comes to the initial state. Returns the gradients by it, if they are needed."""
        way = self._way_back
        if way is not None:
            way.empty()
        if self.first > 0:
            return [None] * len(grads)
        if way is None or way.number != current_pass() or way.adjoint is None or not needed:
            return grads
        return way.initial_grads(grads)

    def _in_this_pass(self) -> WayBack:
        if self.evaluating:
            raise RuntimeError(
                "f asks for a derivative by a tensor on which its state z depends, too, so that it would go "
                "through all evaluations before: ask for it at z.detach().requires_grad_(), where z counts as given"
            )
        if self._way_back is None or self._way_back.number != current_pass():
            ctx = self._end()
            if ctx is None:
                raise RuntimeError(
                    "what f kept is all that is left of this solve, and its states are needed to undo its steps: keep "
                    "its solution until the backward pass, too"
                )
            self._refuse_changes()
            self._way_back = WayBack(self, _states(ctx), None)
        return self._way_back

    def _refuse_changes(self) -> None:
        self.notes.refuse_changes()
        if any((x := ref()) is not None and x._version != version for ref, version in self._versions):
            raise RuntimeError(
                "z0 was changed in place after the solve, and is where the backward pass ends: solve from z0.clone(), "
                "or change z0 after the backward pass"
            )


def relax(half_steps: list[Any], outputs: State, read: State, step: Any) -> None:
    with together(len(half_steps)):
        for half_step, out, x in zip(half_steps, outputs, read, strict=True):
            half_step.relax(out, x, step)


def relax_norms(half_steps: list[Any], outputs: State, read: State, step: Any) -> Tensor:
    """The squared 2-norms of the change and of the new state, of all leaves."""
    with together(len(half_steps)):
        partial = [h.relax_norms(out, x, step) for h, out, x in zip(half_steps, outputs, read, strict=True)]
    return functools.reduce(torch.add, [x.sum((1, 2)) for x in partial])


def relative_change(change: float, value: float) -> float:
    return math.sqrt(change) / (math.sqrt(value) + NORM_FLOOR)


def _leads_to_a_leaf(outputs: State, read: State) -> bool:
    """Whether f depends on anything that needs a gradient, beside what it read."""
    left: list[Any] = [x.grad_fn for x in outputs if x.requires_grad]
    if any(node is None for node in left):  # f returns a leaf
        return True
    seen = {x.grad_fn for x in read}
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        if node.name() == "torch::autograd::AccumulateGrad":
            return True
        seen.add(node)
        left += [following for following, _ in node.next_functions]
    return False


def _states(ctx: Any) -> State:
    """What `_End` saved. A kernel gets the address of it, and a hook may give back another tensor."""
    return [_restored(x, *like) for x, like in zip(ctx.saved_tensors, ctx.like, strict=True)]


def _restored(x: Tensor, dtype: torch.dtype, shape: torch.Size, device: torch.device, stride: Any) -> Tensor:
    if (x.dtype, x.shape, x.device) != (dtype, shape, device):
        raise RuntimeError(
            f"a saved-tensor hook gave back {x.dtype} of shape {tuple(x.shape)} on {x.device} in place of {dtype} of "
            f"shape {tuple(shape)} on {device}, from which the steps cannot be undone: leave the solve out of it "
            "(torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x) around the solve), or give back what "
            "was packed"
        )
    if x.stride() == stride:
        return x
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).copy_(x)


def backward(function: Callable[..., Any]) -> Any:
    """Decorates the backward pass of a function of ours. Where it was started in inference mode, f would have no graph.
    And in a training step that is compiled as a whole f would be compiled, which it was not when it ran before."""

    def run(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "revdeq.solve has no second derivative: call backward without create_graph=True, or differentiate "
                "an iteration that you unroll yourself"
            )
        if any(g is not None and is_batched(g) for g in grads):
            raise RuntimeError(
                "the gradients that this backward pass starts from are batched (is_grads_batched=True, or vmap around "
                "autograd.grad), and a solve has no batched derivative: call it once for each of them"
            )
        if not torch.is_inference_mode_enabled():
            return function(ctx, *grads)
        with torch.inference_mode(False), torch.no_grad():
            return function(ctx, *grads)

    outside = untraced(run)
    return staticmethod(lambda ctx, *grads: (outside if torch.compiler.is_compiling() else run)(ctx, *grads))


class _Begin(torch.autograd.Function):
    """What f reads where a graph begins. With a home, it is the initial state, and that gets a gradient.

    origin: a leaf of no meaning, so that what f reads needs a gradient always.
    """

    @staticmethod
    def forward(ctx: Any, home: Home | None, origin: Tensor | None, *read: Tensor) -> tuple[Tensor, ...]:
        ctx.home = home
        ctx.set_materialize_grads(False)
        return tuple([x.detach() if home is None else x.clone() for x in read])

    @backward
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        needed = any(ctx.needs_input_grad[2:])
        by_start = [] if ctx.home is None else ctx.home().arrive(grads, needed)
        return (None, None, *(by_start if needed and ctx.home is not None else [None] * len(grads)))


class _Relax(torch.autograd.Function):
    """A half-step. What f read is among its inputs, so that the nodes come one after the other whatever f depends on;
    its gradient flows beside the graph, in the adjoints."""

    @staticmethod
    def forward(
        ctx: Any, tape: Tape, home: Home, evaluation: Evaluation, norms: bool, read: State, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.home, ctx.evaluation = home, evaluation
        ctx.set_materialize_grads(False)
        return tuple(tape.step(evaluation.k, list(tensors[: len(tensors) // 2]), read, norms))

    @backward
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        by_outputs = ctx.home().back(ctx.evaluation, grads)
        return (None, None, None, None, None, *by_outputs, *[None] * len(grads))


# Past checks that take 2 us and are about transforms of torch.func, which a solve is not within.
_relax = super(torch.autograd.Function, _Relax).apply


class _End(torch.autograd.Function):
    """The last y and z. It saves the states, where whoever packs what autograd saves can have them."""

    @staticmethod
    def forward(ctx: Any, tape: Tape, home: Home, values: State, *z: Tensor) -> tuple[Tensor, ...]:
        half_steps = [*tape.half_steps[0], *tape.half_steps[1]]
        own = [*(h.state for h in half_steps), *(x for h in half_steps for x in h.spilled)]
        ctx.home, ctx.size = home, len(z)
        ctx.like = [(x.dtype, x.shape, x.device, x.stride()) for x in own]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*own)
        tape._end = weakref.ref(ctx)
        return tuple(values)

    @backward
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.home().turn(ctx, grads)
        return (None, None, None, *[None] * ctx.size)
