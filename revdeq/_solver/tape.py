"""The reversible iteration as part of autograd's graph.

Forward, from y_0 = z_0 and with a = 1 - beta, b = beta gamma and c = beta (1 - gamma) (equation 5 of the paper, where
gamma = 1):

    y_{n+1} = a y_n + b f(z_n) + c z_n        z_{n+1} = a z_n + b f(y_{n+1}) + c y_{n+1}

Half-step k, and evaluation k of f, update y if k is even and z if it is odd, starting from 0. Autograd records all of
it, except for the tensors that f would save (places.py). In the backward pass, its engine walks the graph. At the node
of half-step k, the half-step after it is inverted, f is evaluated again at the input of evaluation k (way_back.py), and
the engine continues through the graph of f, to everything that f depends on.
"""

import collections
import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from .. import _device
from . import nodes
from .call import Call
from .compact import Whole, rows_of, size_for
from .context import FromTheStart, OnceMore, WithoutBenchmark
from .monitor import Adjoint, Monitor
from .norms import relative_change, relative_changes, relative_distance, relative_distances
from .options import Options
from .places import Differentiates, Home, Places
from .private import current_pass, graph_is_kept
from .scheme import Scheme, relax, relax_norms
from .state import State, is_batch_outermost, laid_out_like, refuse_transformed, versions_of
from .way_back import WayBack

ANNOUNCED = 32
"""The number of steps that a solve with a tolerance first allocates for: tol may stop it long before `max_steps`."""

_ORIGIN = torch.empty(0, device="cpu", requires_grad=True)
"""A dummy leaf, so that the input of f always requires a gradient."""


_NOTHING = contextlib.nullcontext()


class Start(NamedTuple):
    """The start of an iteration: z, and y if it differs, in the dtypes of f's input, and the states of the solve that
    it continues, if any."""

    z: State
    y: State
    carried: tuple[State, State] | None = None


class End(NamedTuple):
    """The end of an iteration: y and z in the dtypes of f's input, the auxiliary outputs, and the states."""

    y: State
    z: State
    aux: Any
    states: tuple[State, State] | None


class Last(NamedTuple):
    """The last evaluation of f, with its graph."""

    home: Home
    k: int
    given: State
    outputs: State


class Tape:
    """One solve: steps y and z in the forward pass, and inverts the steps in the backward pass, driven by autograd.

    z0, y0: the initial states, without their graph. steps: the number of steps taken.
    norms: the squared 2-norms of the last change of z and of z; with per_example, those of each example, on the host.
    ends: with per_example, the number of half-steps of each example, int32 on the device; the maximum while it moves.
    first: the step at which the backward pass ends, and `end` the z that f read there, if it is not the initial state.
    last: for an implicit gradient, the last evaluation, if f depends on anything that requires a gradient.
    adjoint: statistics of the backward pass, once it has run.
    """

    _last_norms: Tensor
    _host_ends: Tensor

    def __init__(
        self,
        f: Call,
        start: Start,
        scheme: Scheme,
        options: Options,
        monitor: Monitor | None,
        coefficients: Tensor | None = None,
    ) -> None:
        self.f, self.scheme, self.options, self.monitor = f, scheme, options, monitor
        self._start, self.coefficients, self.is_continued = start, coefficients, start.carried is not None
        self.z0 = [x.detach() for x in start.z]
        self.y0 = [x.detach() for x in start.y] or self.z0
        self._versions = [(weakref.ref(x), x._version) for x in (*start.z, *start.y) if not x.is_inference()]
        self.learns = coefficients is not None and torch.is_grad_enabled() and coefficients.requires_grad
        self.steps = self.first = 0
        self.end: State = []
        self.norms: Tensor | None = None
        self.ends: Tensor | None = None
        self._whole: Whole | None = None
        self._compacts = False
        self.last: Last | None = None
        self.adjoint = Adjoint()
        self.half_steps: tuple[list[Any], list[Any]] = ([], [])
        self.places = Places()
        self._home: Home | None = Home(self)  # during the forward pass; afterwards the graph refers to it
        self._needed = self._stores = self._is_stepwise = False
        # With a tolerance and `backward_steps`: the half-steps and auxiliary outputs before each of the last steps.
        self._before: collections.deque[tuple[Any, Any]] | None = None
        self._read: State = []  # the next input of f, as part of the graph, and the one before
        self._other: State = []
        self._sums: Any = None
        self._left: State = []  # the states after the last of single steps
        self._kept: collections.deque[int] = collections.deque()
        self._way_back: WayBack | None = None
        self._passes: set[int] = set()  # the backward passes that have begun
        self.end_node: Callable[[], Any] = lambda: None  # a weak reference: the node refers to the tape
        self._lock = threading.RLock()

    # Forward

    def run(self) -> End:
        """Run all steps. Divergence is an error if it can be seen without synchronizing."""
        try:
            self._run(look=self.options.tol is not None)
            if self.options.tol is None and _device.can_look(self.z0[0]):
                assert self.norms is not None
                if not math.isfinite(relative_change(*self.norms.tolist())):
                    self._run(look=True)  # again, to name the step
            return self._ended()
        finally:
            self._release()

    def _release(self) -> None:
        """After the forward pass, only the graph refers to the tape: a cycle through its nodes would never be freed."""
        self.half_steps, self._home, self._start, self._sums = ([], []), None, Start([], []), None
        self._read = self._other = []
        self._before, self._whole = None, None
        self._kept.clear()

    def _run(self, look: bool) -> None:
        self.begin(look)
        with WithoutBenchmark():
            while not self.step():
                pass
            if self._before is not None:
                self._record_last()

    def _record_last(self) -> None:
        """Take the last `backward_steps` steps again, now recorded, since it is known where the iteration ends."""
        assert self._before is not None
        steps, first = self.steps, self.steps - len(self._before)
        half_steps, sums = self._before[0]
        self.begin(look=False, first=first)
        if first > 0:
            self.steps, self.half_steps, self._sums = first, half_steps, sums
            y, z = ([h.state for h in row] for row in half_steps)
            self._other, self._read = self.scheme.read(y, self.z0), self.scheme.read(z, self.z0)
            self.end = [x.clone() for x in self._read]
        while self.steps < steps:
            self.step()

    def stepwise(self) -> Iterator[End]:
        """Run step by step. The states stay here, so that each can be differentiated while later ones are still to
        come."""
        self._is_stepwise = True
        self.begin(look=self.options.tol is not None)
        try:
            arrived = False
            while not arrived:
                self._sums = None
                with torch.set_grad_enabled(self._graph), WithoutBenchmark():
                    arrived = self.step()
                self.f.end()
                if arrived or _device.can_look(self.z0[0]):
                    self.scheme.check([*self.half_steps[0], *self.half_steps[1]])
                states = self._other, self._read
                versions = versions_of(*states)
                yield End(*states, self._sums, None)
                if versions != versions_of(*states):
                    raise RuntimeError(
                        "z or y of a step was modified in place, and the next step needs it: clone it first"
                    )
        finally:
            self._left = self.own()
            self._release()

    def begin(self, look: bool, first: int | None = None) -> None:
        """If `look`, test for convergence after each step, which synchronizes. first: the step at which the backward
        pass ends, if that is known."""
        options, graph = self.options, torch.is_grad_enabled()
        exact, self._before = graph and options.gradient == "exact", None
        if not exact:
            first = options.max_steps
        elif first is None:
            undone = options.backward_steps or options.max_steps
            first = max(0, options.max_steps - undone)
            if first > 0 and options.tol is not None:  # only the iteration will show it, which is not recorded yet
                first, self._before = options.max_steps, collections.deque(maxlen=undone)
        self.steps, self.first = 0, first if exact else 0
        self._look, self._graph, self._turn = look, graph, 2 * first
        inputs = (*self._start.z, *self._start.y) if self._turn == 0 else ()
        self._needed = exact and (self.learns or any(x.requires_grad for x in inputs))
        self._kept.clear()
        self._keep = 0 if self._home is None or self._home.is_within else options.keep
        self._sums = None
        if options.per_example:
            self._host_ends = torch.full(self.z0[0].shape[:1], 2 * options.max_steps, dtype=torch.int32, device="cpu")
            self.ends = self._host_ends.to(self.z0[0].device)
            self._compacts = options.compact and not graph and not self._is_stepwise
            if self._compacts:
                self.f.refuse_ambiguous(self.z0)
        self._read, self._other = self.z0, self.y0
        self.f.prepare(options.tol is not None)

    def step(self) -> bool:
        """Take a step, recorded by autograd without the saved tensors of f. Returns whether it was the last one."""
        if self._before is not None:
            self._before.append((tuple([_continued(h) for h in row] for row in self.half_steps), self._sums))
        last = self.steps == self.options.max_steps - 1
        assert self._home is not None
        leaving_out = self.places.leaving_out(self._home) if self._graph and not self._stores else None
        try:
            with leaving_out or _NOTHING:
                self._half_step(2 * self.steps, norms=False)
                self._half_step(2 * self.steps + 1, norms=self._look or self._is_stepwise or last)
        except BaseException as error:
            # torch.func inside f does not allow hooks: store the graph
            refused = leaving_out is not None and isinstance(error, RuntimeError) and "saved tensor hooks" in str(error)
            self._stores |= refused
            restarts = refused or isinstance(error, FromTheStart)
            if leaving_out is not None and not restarts:
                leaving_out.clean_up()
            if self.steps > 0 or not restarts:
                raise
            self.begin(self._look)
            return self.step()
        self.steps += 1
        if self._look and self._has_arrived():
            return True
        if self.steps == self.first:
            self.end = [x.clone() for x in self._read]
        return last

    def _half_step(self, k: int, norms: bool) -> None:
        ends = norms and self._graph and self.options.gradient == "implicit"  # or may do so, with a tolerance
        read, record = self._read, k >= self._turn or ends
        if k == 0:
            f_reads, outputs = self._first(record)
            self._bind(outputs)
        else:
            f_reads = read if k > self._turn else self._given(k)
            outputs = self._evaluate(k, f_reads, record)
        if k >= self._turn:
            moved = list(nodes.relax(self, self._home, k, norms, read, *outputs, *f_reads))
        else:
            assert self._home is not None
            self.last = Last(self._home, k, f_reads, outputs) if record else None
            moved = self.moved(k, [x.detach() for x in outputs], read, norms)
        self._read, self._other = moved, read

    def _given(self, k: int) -> State:
        """The input of f at the beginning of the graph, in new memory. In grad mode it requires a gradient even if z0
        does not."""
        origin = self.coefficients if self.learns else _ORIGIN
        if k == self._turn == 0:
            start = self._start
            return nodes.begin(self._home, origin, len(start.z), *start.z, *start.y)
        read = [x.clone() for x in self._read] if k == 0 else self._read
        home = self._home if k == self._turn else None
        return nodes.begin(home, origin, len(read), *read) if self._graph else read

    def _first(self, record: bool) -> tuple[State, State]:
        """Run the first evaluation, which may have to be repeated. Returns the input and the outputs of f."""
        while True:
            f_reads = self._given(0)
            try:
                with self.f.first():
                    return f_reads, self._evaluate(0, f_reads, record)
            except OnceMore:
                continue

    def _evaluate(self, k: int, read: State, record: bool) -> State:
        """Evaluate f. With `record`, its outputs are part of the graph, without the saved tensors of the evaluation."""
        f, places = self.f, self.places
        # If it is known which evaluation is the last one, only the last `keep` are stored.
        ends_early = self.options.tol is not None or self._is_stepwise
        kept = record and (ends_early or k >= 2 * self.options.max_steps - self._keep)
        keep = self._keep if kept else 0
        mixes, changes = self.scheme.at(k).c != 0, f.changes_its_input
        # Copies of the input: an evaluation that draws may have to be repeated.
        spares = mixes or self._is_stepwise or f.draw.draws or self.options.gradient == "implicit"
        copies = changes and k > 0 and spares
        if record and f.autocasts:
            torch.clear_autocast_cache()  # a cast shared by evaluations would sum their gradients in its precision
        outputs = None
        while outputs is None:
            try:
                if not self._graph or self._stores or not (k == 0 or keep or places.needs_versions):
                    places.begin(k)
                    outputs = f([x.clone() for x in read] if copies else read, k)
                else:
                    outputs = self._noted(k, read, copies)
            except Differentiates:
                places.needs_versions = True
            except OnceMore as error:
                if k == 0 or isinstance(error, FromTheStart):
                    raise
            finally:
                places.running = -1
        places.end(k)
        if f.changes_its_input and not changes and k > 0 and mixes:
            raise RuntimeError(
                "f modifies its input in place, but did not in its first evaluation: do so always, or never"
            )
        if f.has_aux:
            self._add_aux(k)
        if record and not self._needed:
            leaves = nodes.leaves_behind([*outputs, *_tensors(f.aux)], read)
            self._needed = bool(places.leaves) or next(leaves, None) is not None
        if keep or self._stores:
            places.keep(k, outputs)
            self._kept.append(k)
            if len(self._kept) > keep and not self._stores:
                places.empty(self._kept.popleft())
        elif places.filled:
            places.empty(k)
        return outputs

    def _noted(self, k: int, read: State, copies: bool) -> State:
        assert self._home is not None
        self.places.begin(k)
        with self.places.noting(self._home, k):
            return self.f([x.clone() for x in read] if copies else read, k)

    def _add_aux(self, k: int) -> None:
        aux = self.f.aux
        if k < self._turn and self.options.gradient == "exact":  # not differentiated
            aux = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, aux)
        if self.options.aux == "list":
            self._sums = [*(self._sums or ()), aux]
        else:
            self._sums = aux if self._sums is None else tree_map(torch.add, self._sums, aux)

    def _bind(self, outputs: State) -> None:
        """Create the half-steps, with the memory layout of f's outputs."""
        for x in outputs:
            refuse_transformed(x)
        has_tolerance = self.options.tol is not None
        # A mask is drawn in the order of the memory, so that an f that draws must always see the layout of z0.
        like = [torch.empty_like(x) for x in self.z0] if self.f.draw.draws else laid_out_like(outputs, self.z0)
        if self.ends is not None:
            like = [x if is_batch_outermost(x) else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in like]
        announced, scheme = announced_steps(self.options), self.scheme
        if self._start.carried is not None:
            y, z = (scheme.carried(state, like) for state in self._start.carried)
        elif self.y0 is self.z0:
            y, z = scheme.start_both(self.z0, like)
        else:
            y, z = scheme.start(self.y0, like), scheme.start(self.z0, like)
        self.half_steps = scheme.bind(0, y, like, announced), scheme.bind(1, z, like, announced)
        if not has_tolerance:
            scheme.make_room([*self.half_steps[0], *self.half_steps[1]])

    def moved(self, k: int, outputs: Sequence[Tensor], read: State, norms: bool) -> State:
        """Take half-step k. Returns the state that it updates, in the dtypes of f's input and in new memory."""
        half_steps, step = self.half_steps[k % 2], self.scheme.at(k)
        copies = []
        for half_step in half_steps:
            copy = torch.empty_like(half_step.copy)
            half_step.write_to(copy)
            copies.append(copy)
            if self.ends is not None:
                half_step.each(self.ends, k)
        if norms:
            self.norms = relax_norms(half_steps, outputs, read, step)
        else:
            relax(half_steps, outputs, read, step)
        return copies

    def _has_arrived(self) -> bool:
        assert self.norms is not None
        norms = self.scheme.look(self.norms, [*self.half_steps[0], *self.half_steps[1]], self.steps)
        if self.ends is not None:
            return self._have_arrived(norms)
        change = relative_change(*norms.tolist())
        if not math.isfinite(change):
            raise self._not_finite("the state")
        if self.options.tol is None or change > self.options.tol:
            return False
        if self.monitor is not None:
            self.monitor.judge_gap(relative_distance(self._other, self._read), self.options.tol)
        return True

    def _have_arrived(self, norms: Tensor) -> bool:
        """Whether all examples have converged. Those that have now are frozen."""
        assert self.ends is not None and self.options.tol is not None
        moved = self._host_ends >= 2 * self.steps
        self.norms = norms if self.steps == 1 else torch.where(moved, norms, self._last_norms)
        self._last_norms = self.norms
        change = relative_changes(self.norms.double())
        if not change.isfinite().all():
            wrong = int((~change.isfinite()).nonzero()[0])
            if self._whole is not None:
                wrong = int(self._whole.rows[wrong])
            raise self._not_finite(f"example {wrong} of {len(self.z0[0])}")
        arrived = moved & (change <= self.options.tol)
        if arrived.any():
            self._host_ends[arrived] = 2 * self.steps
            self.ends.copy_(self._host_ends)
        moving = self._host_ends > 2 * self.steps
        if moving.any():
            if self._compacts and not self.f.draw.draws:
                self._cut(moving)
            return False
        if self._whole is not None:
            self._take_parts(self._whole.put_back(self._parts()))
        if self.monitor is not None and len(change) and (change <= self.options.tol).all():
            self.monitor.judge_gap(relative_distances(self._other, self._read).max(), self.options.tol)
        return True

    def _cut(self, moving: Tensor) -> None:
        """Continue without most of the frozen examples."""
        size = size_for(int(moving.sum()))
        if size >= len(moving):
            return
        parts = self._parts()
        if self._whole is None:
            self._whole = Whole([x.clone() for x in parts])
        else:
            self._whole.put_back(parts)
        kept = self._whole.cut(moving, size)
        self._take_parts([rows_of(x, kept.to(x.device)) for x in parts])
        self.f.cut(len(self.z0[0]), self._whole.rows)

    def _parts(self) -> State:
        """All per-example tensors."""
        states = [h.state for half_steps in self.half_steps for h in half_steps]
        return [*self._other, *self._read, *states, self.norms.T, self._host_ends]  # type: ignore[union-attr]

    def _take_parts(self, parts: State) -> None:
        size = len(self.z0)
        self._other, self._read, *states = (parts[i : i + size] for i in range(0, 4 * size, size))
        rows = zip(self.half_steps, states, (self._other, self._read), strict=True)
        self.half_steps = tuple([h.of(x, c) for h, x, c in zip(*row, strict=True)] for row in rows)  # type: ignore[assignment]
        self._last_norms, self._host_ends = parts[-2].T.contiguous(), parts[-1]
        self.norms, self.ends = self._last_norms, self._host_ends.to(self._read[0].device)

    def _not_finite(self, what: str) -> FloatingPointError:
        if not all(x.isfinite().all() for x in (*self.z0, *self.y0)):
            return FloatingPointError("z0 is not finite: start from finite numbers")
        if (name := self.f.not_finite()) is not None:
            return FloatingPointError(f"{name}, an argument of f, contains NaN or infinity: pass finite numbers")
        if all(x.isfinite().all() for x in self._read):
            return FloatingPointError(
                f"{what} is so large after step {self.steps} of at most {self.options.max_steps} that its norm is no "
                "number of float64 (beyond 1e154, the square of an element is not): scale f and z0 down"
            )
        return FloatingPointError(
            f"the norm of {what} is not finite after step {self.steps} of at most {self.options.max_steps} "
            f"(beta = {self.scheme.beta:.6g}): f returns NaN or infinity, or the iteration diverges; try a smaller "
            "beta, or an f that contracts"
        )

    def _ended(self) -> End:
        """Create the node at which gradients with respect to the last y and z arrive."""
        if not self._look:
            self.scheme.check([*self.half_steps[0], *self.half_steps[1]])
        self.f.end()
        size, y, z = len(self.z0), self._other, self._read
        if self.f.changes_its_input:  # including the last y
            y = self.scheme.read([h.state for h in self.half_steps[0]], y)
        values = [x.detach() for x in (*y, *z)]
        aux, spec = tree_flatten(self._sums) if self.options.aux else ([], None)
        if self._needed and self.options.gradient == "exact":
            inner = [i for i, x in enumerate(aux) if isinstance(x, Tensor) and x.requires_grad]
            last = nodes.end(self, self._home, values, size, *z, *(aux[i] for i in inner))
            values = list(last[: 2 * size])
            for i, x in zip(inner, last[2 * size :], strict=True):
                aux[i] = x
        elif not self._needed:
            self.last = None
        y_states, z_states = ([h.state for h in half_steps] for half_steps in self.half_steps)
        beside = None if spec is None else tree_unflatten(aux, spec)
        return End(values[:size], values[size:], beside, (y_states, z_states))

    # Backward, called by the engine

    def turn(self, ctx: Any, grads: Sequence[Tensor | None]) -> None:
        """At the end of the iteration, with gradients with respect to the last y and z."""
        nodes.refuse_other_derivatives(grads)
        self.refuse_changes()
        self._begin_pass()
        self._way_back = WayBack(self, nodes.states(ctx), grads, graph_is_kept())

    def _begin_pass(self) -> None:
        """Raise if another backward pass has begun since this one did: it has replaced the adjoints."""
        number = current_pass()
        if number in self._passes:
            raise RuntimeError(
                "two backward passes go through this solve at the same time (in two threads, or one in a hook of the "
                "other): run them one after the other"
            )
        if number >= 0:
            self._passes.add(number)

    def back(self, home: Home, k: int, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """At half-step k, with gradients with respect to the state that it updated. Returns those with respect to f's
        outputs."""
        with self._lock:
            way = self._way_back
            if way is None or way.number != current_pass() or self.places.running >= 0:
                way = self._in_this_pass(grads)
            return way.undo(home, k, grads)

    def reaches(self, home: Home, k: int) -> bool:
        """Inside evaluation k, whose saved tensors are missing. Returns whether any gradient flows there."""
        if k < 2 * self.first or self.options.gradient != "exact":
            return False
        with self._lock:
            self._in_this_pass(()).reach(home, k)
        return True

    def arrive(self, grads: Sequence[Tensor | None], needed: bool, apart: bool) -> tuple[Tensor | None, list[Any]]:
        """At the beginning of the graph. Returns the gradients with respect to the coefficients, and if they are
        needed, to z0 and, if that is `apart`, to y0."""
        way, nothing = self._way_back, [None] * len(grads)
        if way is not None:
            way.empty()
        if way is None or way.number != current_pass() or way.adjoint is None:
            return None, [*(nothing if self.first else grads), *(nothing if apart else ())]
        if not needed or self.first > 0:
            return way.by_coefficients(), nothing * (1 + apart)
        by_z0, by_y0 = way.initial_grads(grads, apart)
        return way.by_coefficients(), [*by_z0, *by_y0]

    def _in_this_pass(self, grads: Sequence[Tensor | None]) -> WayBack:
        if self.places.running >= 0:
            raise RuntimeError(
                "f computes a derivative with respect to a tensor that its state z also depends on, which would go "
                "through all earlier evaluations: compute it at z.detach().requires_grad_(), with z as a constant"
            )
        if self._way_back is None or self._way_back.number != current_pass():
            nodes.refuse_other_derivatives(grads)
            self.refuse_changes()
            self._begin_pass()
            self._way_back = WayBack(self, self._saved(), None, True)
        return self._way_back

    def _saved(self) -> State:
        """The last states, and their spilled remainders."""
        if self._is_stepwise:
            return self.own() if self._home is not None else self._left
        ctx = self.end_node()
        if ctx is None:
            raise RuntimeError(
                "only a tensor that f stored is left of this solve, but inverting its steps needs the final states: "
                "keep the solution alive until the backward pass"
            )
        return nodes.states(ctx)

    def own(self) -> State:
        """The current states, and their spilled remainders."""
        half_steps = [*self.half_steps[0], *self.half_steps[1]]
        return [*(h.state for h in half_steps), *(x for h in half_steps for x in h.spilled)]

    def refuse_changes(self) -> None:
        self.places.refuse_changes()
        if any((x := ref()) is not None and x._version != version for ref, version in self._versions):
            raise RuntimeError(
                "z0 was modified in place after the solve, but the backward pass needs it: solve from z0.clone(), or "
                "modify z0 after the backward pass"
            )


def announced_steps(options: Options) -> int:
    """The number of steps to allocate for."""
    return options.max_steps if options.tol is None else min(options.max_steps, ANNOUNCED)


def _continued(half_step: Any) -> Any:
    """A copy, which can be stepped and inverted like the original."""
    other = half_step.of(half_step.state.clone(), half_step.copy)
    other.spilled = list(half_step.spilled)
    return other


def _tensors(tree: Any) -> State:
    return [x for x in tree_flatten(tree)[0] if isinstance(x, Tensor)]
