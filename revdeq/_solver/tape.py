"""The reversible iteration on autograd's own graph.

Forward, from y_0 = z_0 and with a = 1 - beta, b = beta gamma and c = beta (1 - gamma) (equation 5 of the paper, where
gamma = 1):

    y_{n+1} = a y_n + b f(z_n) + c z_n        z_{n+1} = a z_n + b f(y_{n+1}) + c y_{n+1}

Half-step k, and evaluation k of f, move y where k is even and z where it is odd, from 0 on. Autograd records all of it,
but for the tensors that f would save (places.py). Backward, its engine walks the graph. When it comes to the node of
half-step k, the half-step after it is undone (equation 6) while the adjoints follow (Algorithm 1), f is evaluated again
where evaluation k was, and the engine goes on through f by itself, to whatever f depends on. One evaluation's tensors
are there at a time.
"""

import collections
import contextlib
import functools
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _device
from ..kernels import reference
from ..kernels.backends import together
from .call import Call
from .context import OnceMore
from .monitor import Monitor, apart, typical_magnitude
from .options import Options
from .places import Evaluation, Home
from .private import current_pass, is_batched, untraced
from .scheme import Scheme
from .state import State, dense, laid_out_like

NORM_FLOOR = 1e-5
"""Added to the norm of the state in the relative change, so that a solution of zero can be reached."""

ANNOUNCED = 32
"""Steps that a solve with a tolerance is prepared for at first: it may be content long before `max_steps`."""


class Tape:
    """One solve: forward it steps y and z, and backward it undoes them as autograd asks.

    steps: those that were taken. norms: the squared 2-norms of the last change of z and of z.
    at: how many half-steps y and z are ahead of the initial state, on the way back.
    """

    def __init__(
        self, f: Call, initial: State, scheme: Scheme, options: Options, monitor: Monitor | None
    ) -> None:
        self.f, self.scheme, self.options, self.monitor = f, scheme, options, monitor
        self.initial = [x.detach() for x in initial]
        self._versions = [(weakref.ref(x), x._version) for x in initial if not x.is_inference()]
        self.steps = 0
        self.norms: Tensor | None = None
        self.home: Home | None = Home(self)  # until the forward pass has ended: the graph holds it
        self._evaluating = self._stores = False
        self._kept: collections.deque[Evaluation] = collections.deque()
        self._last: Evaluation | None = None
        self._needed = False
        self.half_steps: tuple[list[Any], list[Any]] = ([], [])
        self._back: _WayBack | None = None
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
                return self._run(z0, look=True)  # once more, to say at which step
        return last

    def _run(self, z0: State, look: bool) -> tuple[State, State]:
        options, step, max_steps = self.options, self.scheme.step, self.options.max_steps
        grad = torch.is_grad_enabled()
        exact = grad and options.gradient == "exact"
        # With a tolerance nobody knows yet where the way back will end.
        self.first = max_steps - (options.backward_steps or max_steps) if exact and options.tol is None else 0
        self.end: State = []
        self.steps, self._needed = 0, exact and any(x.requires_grad for x in z0)
        self._kept.clear()
        origin = torch.empty(0, device="cpu", requires_grad=True) if grad else None

        def recorded(k: int) -> bool:
            """Whether evaluation k is a part of the graph: for an implicit gradient the last one, whichever that is."""
            if exact:
                return k >= 2 * self.first
            return grad and k % 2 == 1 and (look or k == 2 * max_steps - 1)

        def begun(k: int, read: State) -> State:
            """What f reads where the graph begins."""
            if exact and k == 0:
                return list(_Begin.apply(self.home, True, origin, *z0))
            return list(_Begin.apply(None, False, origin, *read))

        read: State = self.initial
        for k in range(2 * max_steps):
            starts = grad and (k == 2 * self.first or not exact or k < 2 * self.first)
            given = begun(k, read) if starts else [x.clone() for x in read] if k == 0 else read
            outputs = self._first(z0, given, begun if starts else None, recorded(0)) if k == 0 else None
            if outputs is None:
                outputs = self._evaluate(k, given, recorded(k))
            if k == 0:
                self._bind(outputs, read, look)
            norms = k % 2 == 1 and (look or k == 2 * max_steps - 1)
            last, source = read, self.initial if k == 0 else read
            if exact and recorded(k):
                read = list(_Relax.apply(self, self.home, self._last, norms, source, *outputs, *given))
            else:
                if grad and recorded(k):
                    self.outputs, self.given = outputs, given
                with torch.no_grad():
                    read = self.step(k, [x.detach() for x in outputs], source, norms)
            del outputs, given
            if k % 2 == 0:
                continue
            self.steps += 1
            if look and self._has_arrived():
                break
            if self.steps == self.first:
                self.end = [x.detach().clone() for x in read]
        if options.tol is not None and options.backward_steps:
            self.first = self.steps - min(options.backward_steps, self.steps)
        if not look:
            self.scheme.check([*self.half_steps[0], *self.half_steps[1]])
        if self.f.changes_its_input:  # the last y, too
            last = self.scheme.read([h.state for h in self.half_steps[0]], last)
        return self._ended(last, read, exact)

    def _ended(self, y: State, z: State, exact: bool) -> tuple[State, State]:
        values = [x.detach() for x in (*y, *z)]
        if exact and self._needed:
            values = list(_End.apply(self, self.home, values, *z))
        self.f.end()
        self.half_steps, self.home = ([], []), None  # the states are saved in the graph
        if exact:
            self._last = None
        return values[: len(y)], values[len(y) :]

    def _first(self, z0: State, given: State, begun: Any, record: bool) -> State:
        """The first evaluation, which may have to be repeated."""
        while True:
            try:
                with self.f.first(self.options.tol is not None):
                    return self._evaluate(0, given, record)
            except OnceMore:
                pass
            except RuntimeError as error:
                if "saved tensor hooks" not in str(error) or self._stores:
                    raise
                self._stores = True  # torch.func inside f allows for none: the graph of this solve is stored
            given = begun(0, z0) if begun is not None else [x.clone() for x in self.initial]

    def _evaluate(self, k: int, read: State, record: bool) -> State:
        nodes = {x.grad_fn for x in read}
        spared = self.f.changes_its_input and self.scheme.step.c != 0 and k > 0
        changed = self.f.changes_its_input
        given = [x.clone() for x in read] if spared else read
        self._evaluating = True
        evaluation = Evaluation(self.home if record else None, k)
        hooks: Any = evaluation if torch.is_grad_enabled() and not self._stores else contextlib.nullcontext()
        if record:
            torch.clear_autocast_cache()  # a cast that two evaluations share would sum their gradients in its precision
        try:
            with hooks:
                outputs = self.f(given)
        except BaseException:
            evaluation.empty()
            raise
        finally:
            self._evaluating = False
        if k > 0 and self.scheme.step.c and self.f.changes_its_input and not changed:
            raise RuntimeError(
                "f changes its input in place, and did not in its first evaluation: let it do so always, or never"
            )
        if not record:
            evaluation.empty()
            return outputs
        self._needed = self._needed or _leads_to_a_leaf(outputs, nodes)
        self._last = evaluation
        keep = 0 if self.home.is_within else self.options.keep
        if self._stores or keep:
            evaluation.values = [x.detach() for x in outputs]
        if not keep and not self._stores:
            evaluation.empty()
        elif keep and not self._stores:
            self._kept.append(evaluation)
            if len(self._kept) > keep:
                self._kept.popleft().empty()
        return outputs

    def _bind(self, outputs: State, read: State, look: bool) -> None:
        like = laid_out_like(outputs, read)
        announced = min(self.options.max_steps, ANNOUNCED) if self.options.tol is not None else self.options.max_steps
        y = self.scheme.start(self.initial, like)
        z = [x.clone() for x in y]
        self.half_steps = self.scheme.bind(y, like, announced), self.scheme.bind(z, like, announced)
        if self.options.tol is None:
            self.scheme.make_room([*self.half_steps[0], *self.half_steps[1]])

    def step(self, k: int, outputs: State, read: State, norms: bool) -> State:
        """Half-step k. What f reads of the state that it moves."""
        half_steps, step = self.half_steps[k % 2], self.scheme.step
        copies = [torch.empty_like(h.copy) for h in half_steps]
        for h, c in zip(half_steps, copies, strict=True):
            h.write_to(c)
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

    # Backward

    def turns(self, ctx: Any, grads: Sequence[Tensor | None]) -> None:
        """The engine comes to the end of the iteration, with gradients by the last y and z."""
        self._back = _WayBack(self, ctx, list(map(_restored, ctx.saved_tensors, ctx.like)), grads)

    def back(self, evaluation: Evaluation, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The engine comes to the half-step after an evaluation, with gradients by what f reads of the state that it
        moved. Returns those by what f returned."""
        with self._lock:
            return self._way_back().undo(evaluation, grads)

    def begins(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The engine comes to the initial state. Returns gradients by it."""
        way = self._back
        if self.first:
            return [None] * len(grads)
        if way is None or way.task != current_pass() or way.adjoint is None:
            return grads
        return way.initial_grads(grads)

    def reaches(self, evaluation: Evaluation) -> bool:
        """The engine comes to the inside of an evaluation whose tensors are not there. Not if there is no gradient."""
        with self._lock:
            return self._way_back().reach(evaluation)

    def _way_back(self) -> "_WayBack":
        if self._evaluating:
            raise RuntimeError(
                "f asks for a derivative by a tensor on which its state z depends, too, so that the derivative would go "
                "through all evaluations before: ask for it at z.detach().requires_grad_(), where z counts as given"
            )
        if self._back is None or self._back.task != current_pass():
            ctx = self._end()
            if ctx is None:
                raise RuntimeError(
                    "what f kept is all that is left of this solve, and its states are needed to undo its steps: keep "
                    "its solution until the backward pass, too"
                )
            self._back = _WayBack(self, ctx, [_restored(*row).clone() for row in zip(ctx.saved_tensors, ctx.like, strict=True)], None)
        return self._back

    def refuse_changed_start(self) -> None:
        if any((x := ref()) is not None and x._version != version for ref, version in self._versions):
            raise RuntimeError(
                "z0 was changed in place after the solve, and is where the backward pass ends: solve from z0.clone(), "
                "or change z0 after the backward pass"
            )


class _WayBack:
    """One backward pass through a tape.

    at: how many half-steps y and z are ahead of the initial state. read: what f read in evaluation at - 1.
    out: what it returned, once it was evaluated again. adjoint: of y and z, multiplied by b, so that they are the seeds
    of the next products; None as long as no gradient has come. An adjoint's decay by a waits for the pass that adds to
    it.
    """

    def __init__(self, tape: Tape, ctx: Any, saved: State, grads: Sequence[Tensor | None] | None) -> None:
        tape.refuse_changed_start()
        self.tape, self.scheme, self.task = tape, tape.scheme, current_pass()
        self._ctx, self._saved, self._grads = ctx, saved, grads
        self.at, self.adjoint, self.out = 2 * tape.steps, None, None
        self._filled: Evaluation | None = None
        self._leaves: State | None = None
        self._spares_seeds: bool | None = None  # not known before the first product
        self._seeds: list[tuple[Tensor, int]] = []
        self._maxima: State = []
        self._loaded = False

    def _load(self) -> None:
        """When the engine has left the node that saved the states: if it has freed them, they are ours to change."""
        tape, size, step = self.tape, len(self.tape.initial), self.scheme.step
        saved, self._saved, self._loaded = self._saved, [], True
        self.keeps = self._grads is None or _is_kept(self._ctx)
        if self.keeps and self._grads is not None:
            saved = [x.clone() for x in saved]
        self._ctx = None
        spills = len(saved) // (2 * size) - 1
        spilled = [saved[2 * size + i * spills :][:spills] for i in range(2 * size)]
        y, z = saved[:size], saved[size : 2 * size]
        self.read = self.scheme.read(y, tape.initial)
        self._half_steps = (
            self.scheme.bind(y, self.read, tape.steps, spilled[:size]),
            self.scheme.bind(z, self.read, tape.steps, spilled[size:]),
        )
        watched = tape.monitor is not None and (tape.first == 0 or tape.end)
        self._sizes = [typical_magnitude(x) for x in self.read] if watched else []
        self._seen = self._sizes
        if self._grads is not None:
            by_y = [_scaled(g, step.b / step.a, x) for g, x in zip(self._grads[:size], self.read, strict=True)]
            by_z = [_scaled(g, step.b, x) for g, x in zip(self._grads[size:], self.read, strict=True)]
            self.adjoint, self._grads = (by_y, by_z), None

    def undo(self, evaluation: Evaluation, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        if not self._loaded:
            self._load()
        k = evaluation.k
        if k < 2 * self.tape.first:
            return [None] * len(grads)
        self._look_at_seeds()
        if self.out is not None and self.at == k + 2:
            self._undo(grads)
        else:
            self._go_to(k + 1)
            self._add(k % 2, grads)
        if self.out is None:
            self._evaluate(evaluation)
        if k == 2 * self.tape.first:
            self._arrive()
        return self._seeded(k % 2)

    def reach(self, evaluation: Evaluation) -> bool:
        if not self._loaded:
            self._load()
        if evaluation.k < 2 * self.tape.first:
            return False
        if self.at == evaluation.k + 1 and self._filled is evaluation:
            return True
        if self.adjoint is not None:
            raise RuntimeError(
                "a gradient arrives at an evaluation of f that the backward pass has not come to yet, or has left behind"
            )
        self._go_to(evaluation.k + 1)
        self._evaluate(evaluation)
        return True

    def _go_to(self, at: int) -> None:
        """Without products: no gradient has come yet."""
        if self.at < at or (self.at > at and self.adjoint is not None):
            raise RuntimeError("the backward pass comes to the steps of a solve in another order than theirs")
        while self.at > at:
            if self.out is None:
                self._evaluate(Evaluation(None, self.at - 1))
            half_steps = self._half_steps[(self.at - 1) % 2]
            for h, out in zip(half_steps, self._outputs(), strict=True):
                h.invert(out, self.scheme.step)
            self._leave()

    def _add(self, which: int, grads: Sequence[Tensor | None]) -> None:
        if self.adjoint is None and any(g is not None for g in grads):
            zeros: Any = [[_scaled(None, 1, x) for x in self.read] for _ in range(2)]
            self.adjoint = tuple(zeros)
        for adjoint, g in zip(self.adjoint[which] if self.adjoint else (), grads, strict=False):
            if g is not None:
                adjoint.add_(g.to_dense(), alpha=self.scheme.step.b)

    def _undo(self, grads: Sequence[Tensor | None]) -> None:
        """The last half-step, and the product of its adjoint with the Jacobian of f."""
        k, step = self.at - 1, self.scheme.step
        if self.adjoint is None:
            self.adjoint = tuple([_scaled(None, 1, x) for x in self.read] for _ in range(2))
        adjoint, other = self.adjoint[1 - k % 2], self.adjoint[k % 2]
        rows = zip(self._half_steps[k % 2], self._outputs(), adjoint, dense(grads, self.read), other, strict=True)
        with together(len(self.read)):
            if k > 1 or not self._sizes:
                for h, out, a, v, o in rows:
                    h.invert_adjoint(out, a, v, o, step, step)
            else:
                for (h, out, a, v, o), x, size in zip(rows, self.tape.initial, self._sizes, strict=True):
                    self._maxima.append(h.invert_compare(out, x, size, a, v, o, step, step))
        if k == 1:  # the initial state is known: use it, not its reconstruction
            for c, x in zip(self.read, self.tape.initial, strict=True):
                c.copy_(x)
        self._leave()

    def _leave(self) -> None:
        """An evaluation whose half-step is undone."""
        if self._filled is not None and not (self.keeps and self._filled.values is not None):
            self._filled.empty(self.read[0].device)
        self._filled, self.out = None, None
        self.at -= 1

    def _evaluate(self, evaluation: Evaluation) -> None:
        """f once more where evaluation at - 1 was, unless what it saved was kept."""
        tape, f = self.tape, self.tape.f
        if evaluation.values is not None:
            self.out, self._filled = evaluation.values, evaluation
            return
        # In another layout, f could compute other bits than it did.
        read = [x.clone() for x in tape.initial] if self.at == 1 else self.read
        if f.changes_its_input and self.scheme.step.c:
            read = [x.clone() for x in read]
        leaves = [x.detach().requires_grad_() for x in read]
        tape._evaluating = True
        try:
            with f.as_before(self._leaves_of(evaluation)):
                given = list(_Begin.apply(None, False, None, *leaves)) if f.changes_its_input else leaves
                with evaluation.again() if evaluation.is_recorded else contextlib.nullcontext():
                    self.out = [x.detach() for x in f(given)]
        finally:
            tape._evaluating = False
        self._filled = evaluation
        if self.at == 2 * tape.steps and self._sizes and self.scheme.resolution:
            # A state too small for its own resolution is 0; what f made of it need not be.
            self._seen = [torch.maximum(s, typical_magnitude(x)) for s, x in zip(self._sizes, self.out, strict=True)]

    def _leaves_of(self, evaluation: Evaluation) -> State:
        """Of one evaluation: the others depend on the same."""
        if self._leaves is None and evaluation.is_recorded:
            self._leaves = evaluation.leaves()
        return self._leaves or []

    def _arrive(self) -> None:
        """At the initial state, or where the way back ends: the verdict."""
        tape, step = self.tape, self.scheme.step
        if self._sizes and tape.first == 0:
            rows = zip(self._half_steps[0], self._outputs(), tape.initial, self._sizes, strict=True)
            with together(len(self.read)):
                self._maxima += [h.invert_compare(o, x, s, None, None, None, step, step) for h, o, x, s in rows]
        elif self._sizes:
            self._maxima += map(apart, self.read, tape.end, self._sizes)
        if tape.monitor is not None:
            assert tape.norms is not None
            tape.monitor.judge(self._maxima, tape.norms, self._seen)
        if not self.keeps:
            del tape.f  # and what it closes over: there will be no other backward pass

    def initial_grads(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """z_0 starts both y and z."""
        assert self.adjoint is not None
        step, result = self.scheme.step, []
        for yb, zb, g, x in zip(*self.adjoint, dense(grads, self.read), self.tape.initial, strict=True):
            reference.update_adjoint(zb, g, yb, step)
            result.append(((zb + step.a * yb) / step.b).to(x.dtype))
        return result

    def _seeded(self, which: int) -> list[Tensor | None]:
        """The seeds are the adjoints themselves. A hook or a custom function in f that changes its gradient in place
        would change them: after the first product it is known whether that happens."""
        assert self.out is not None
        if self.adjoint is None:
            return [None] * len(self.out)
        copy = not self._spares_seeds
        seeds = [a.to(out.dtype, copy=copy) for a, out in zip(self.adjoint[which], self.out, strict=True)]
        watched = seeds if self._spares_seeds is None else self.adjoint[which]
        self._seeds = [(x, x._version) for x in watched]
        if self._spares_seeds is None:
            self._expected = [a for a in self.adjoint[which]]
        return list(seeds)

    def _look_at_seeds(self) -> None:
        changed = any(x._version != version for x, version in self._seeds)
        if self._spares_seeds is None and self._seeds:
            same = all(map(_equal, (x for x, _ in self._seeds), self._expected))
            self._spares_seeds = not changed and same
        elif changed:
            raise RuntimeError(
                "f changes its gradient in place, and not in every evaluation (a hook, or the backward of a custom "
                "function?), so that the solver's own adjoint was changed: write g.clamp(...) in place of g.clamp_(...)"
            )
        self._seeds, self._expected = [], []

    def _outputs(self) -> State:
        """f may return one part of its state as another, and the half-steps overwrite the parts one after the other."""
        assert self.out is not None
        if len(self.out) == 1:
            return self.out
        memory = {c.untyped_storage().data_ptr() for c in self.read}
        return [o.clone() if o.untyped_storage().data_ptr() in memory else o for o in self.out]


def relax(half_steps: list[Any], outputs: State, read: State, step: Any) -> None:
    if len(half_steps) == 1:
        half_steps[0].relax(outputs[0], read[0], step)
        return
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


def _scaled(grad: Tensor | None, factor: float, like: Tensor) -> Tensor:
    wide = torch.promote_types(like.dtype, torch.float32)
    if grad is None:
        return torch.zeros_like(like, dtype=wide)
    return torch.empty_like(like, dtype=wide).copy_(grad).mul_(factor)


def _equal(given: Tensor, seed: Tensor) -> bool:
    """Also after a change that autograd does not count, unless a look would wait for the device."""
    return not _device.can_look(seed) or torch.equal(given, seed.to(given.dtype))


def _restored(x: Tensor, like: Any) -> Tensor:
    """A kernel gets the address of a state that was saved, and a hook may give back another."""
    dtype, shape, device, stride = like
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


def _is_kept(ctx: Any) -> bool:
    """Whether this backward pass runs with retain_graph=True: if not, the engine has freed what its last node saved."""
    try:
        return len(ctx.saved_tensors) > 0
    except RuntimeError:
        return False


def _leads_to_a_leaf(outputs: State, stop: set[Any]) -> bool:
    """Whether f depends on anything that needs a gradient, beside its state."""
    left = [x.grad_fn for x in outputs if x.requires_grad]
    if any(node is None for node in left):  # f returns a leaf
        return True
    seen = set(stop)
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        if node.name() == "torch::autograd::AccumulateGrad":
            return True
        seen.add(node)
        left += [following for following, _ in node.next_functions]
    return False


def _backward(function: Callable[..., Any]) -> Any:
    """Around a backward pass: where it was started in inference mode, f would have no graph. And in a training step
    that is compiled as a whole f would be compiled, which it was not when it ran before."""

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

    plain, outside = functools.wraps(function)(run), untraced(run)
    return staticmethod(
        lambda ctx, *grads: (outside if torch.compiler.is_compiling() else plain)(ctx, *grads)
    )


class _Begin(torch.autograd.Function):
    """What f reads where the graph begins. origin: a leaf of no meaning, so that f's input needs a gradient always."""

    @staticmethod
    def forward(ctx: Any, home: Any, whole: bool, origin: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.home, ctx.whole = home, whole
        ctx.set_materialize_grads(False)
        return tuple(x.clone() if whole else x.detach() for x in tensors)

    @_backward
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        none: list[Any] = [None] * len(grads)
        if ctx.home is None or not any(ctx.needs_input_grad[3:]):
            return (None, None, None, *none)
        return (None, None, None, *ctx.home().begins(grads))


class _Relax(torch.autograd.Function):
    """A half-step. What f read is an input of its own, so that the nodes come one after the other in any case."""

    @staticmethod
    def forward(
        ctx: Any, tape: Tape, home: Home, evaluation: Evaluation, norms: bool, read: State, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.home, ctx.evaluation = home, evaluation
        ctx.set_materialize_grads(False)
        return tuple(tape.step(evaluation.k, list(tensors[: len(tensors) // 2]), read, norms))

    @_backward
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        none: list[Any] = [None] * len(grads)
        return (None, None, None, None, None, *ctx.home().back(ctx.evaluation, grads), *none)


class _End(torch.autograd.Function):
    """The last y and z. It saves the states where whoever packs what autograd saves can have them."""

    @staticmethod
    def forward(ctx: Any, tape: Tape, home: Home, values: State, *z: Tensor) -> tuple[Tensor, ...]:
        half_steps = [*tape.half_steps[0], *tape.half_steps[1]]
        ctx.home, ctx.size = home, len(z)
        ctx.set_materialize_grads(False)
        own = [*(h.state for h in half_steps), *(x for h in half_steps for x in h.spilled)]
        ctx.like = [(x.dtype, x.shape, x.device, x.stride()) for x in own]
        ctx.save_for_backward(*own)
        tape._end = weakref.ref(ctx)
        return tuple(values)

    @_backward
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.home().turns(ctx, grads)
        return (None, None, None, *[None] * ctx.size)
