"""capture=True: steps as CUDA graphs.

With a small f, a solve is limited by the host, which launches one kernel after the other. Here one forward step and one
backward step, including f, are captured once per kind of inputs, and replayed for every step, so that a step costs the
host one call. They use static memory: y, z, the input and the arguments of f, the adjoints and the accumulated
gradients. Each solve copies its tensors in and its results out, so that solves may be interleaved.

The first solve with a kind of inputs runs as usual, and shows whether f can be captured. The second one captures.

The bits are those of an uncaptured solve, with one exception: if f, or several solves, use a parameter more than once,
its gradients are first accumulated within an evaluation and within a solve, where autograd adds all of them one by one.
"""

import functools
import threading
import warnings
import weakref
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from .. import _device
from ..kernels.half_step import layout
from ..kernels.radix import Plan
from .monitor import Sizes, call_site, typical_magnitudes
from .nodes import backward, leaves_behind, refuse_other_derivatives
from .options import NAMES, Options
from .scheme import Integers, relax, relax_norms
from .state import State, dense, flattened, structured
from .tape import End, Tape
from .way_back import Adjoints, first_factors, initial_grads, room_for_maxima

PLAIN = ("beta", "gamma", "max_steps", "tol", "state", "check", "capture")
"""The options that captured steps support."""

CONSTANTS = (Tensor, bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
"""Types of arguments that a key of captured steps can tell apart."""

MOST = 8
"""The maximum number of kinds of inputs that are captured per f: each has its own static memory."""

_kinds: "weakref.WeakKeyDictionary[nn.Module, dict[Hashable, Steps | None]]" = weakref.WeakKeyDictionary()
_told: set[tuple[Any, ...]] = set()


def run(tape: Tape, spec: Any, f: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> End:
    """Run all steps of a solve, as CUDA graphs if possible."""
    if _device.is_capturing(tape.z0[0].device):
        return tape.run()  # as part of the enclosing capture
    why = _unsuitable(tape, f, args, kwargs)
    if why is not None:
        tell(why)
        return tape.run()
    key, kinds = _kind(tape, f, args, kwargs), _kinds.setdefault(f, {})
    if key not in kinds:
        end = tape.run()
        if why := _unrepeatable(tape, end):
            tell(why)
        elif len(kinds) < MOST:
            kinds[key] = None
        else:
            tell(f"f was called with more than {MOST} kinds of inputs (shapes, dtypes, modes): pad them to a few")
        return end
    steps = kinds[key]
    if steps is None:
        try:
            steps = kinds[key] = Steps(tape, spec, f, args, kwargs)
        except Exception as error:
            first = str(error).strip().splitlines()[:1]
            tell(f"f cannot be captured ({type(error).__name__}: {''.join(first)})")
            return tape.run()
    return steps.solve(tape, args, kwargs)


def _unsuitable(tape: Tape, f: Any, args: Any, kwargs: Any) -> str | None:
    """Why a solve cannot be captured, as far as that is known before f runs."""
    device, usual = tape.z0[0].device, Options()
    if not _device.records_graphs(device):
        return f"z0 is on {device}, which has no CUDA graphs: move z0 and f to a GPU"
    if not isinstance(f, nn.Module):
        return f"f is of type {type(f).__name__}: make it a module, whose parameters have a fixed address"
    for name in NAMES:
        value = getattr(tape.options, name)
        if name not in PLAIN and value != getattr(usual, name):
            return f"{name} = {value!r} is not supported: leave it out"
    for x in tree_leaves((args, kwargs)):
        if not isinstance(x, CONSTANTS):
            return f"an argument of f is of type {type(x).__name__}, which may change: pass a tensor or a number"
    if tape.y0 is not tape.z0:
        return "the solve starts from a y0 or from another solution: start it from z0 alone"
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(m, name) for m in f.modules() for name in hooks) or any(p._backward_hooks for p in f.parameters()):
        return "f has hooks, which would run only during the capture: remove them"
    return None


def _unrepeatable(tape: Tape, end: End) -> str | None:
    """Why a solve cannot be captured, as its first run has shown."""
    if tape.f.draw.draws:
        return "f draws random numbers, which must be the same in all evaluations: remove its dropout"
    if tape.f.changes_its_input:
        return "f modifies its input in place: clone it inside f"
    if any(layout(x) != layout(z) for x, z in zip(tape.z0, end.z, strict=True)):
        return "f's output has another memory layout than z0: give z0 that layout"
    return None


def tell(why: str) -> None:
    """Warn once per calling line."""
    site = call_site()
    if (*site, why) not in _told:
        _told.add((*site, why))
        warnings.warn_explicit(f"capture=True: the solve runs as usual, because {why}", RuntimeWarning, *site)


def _kind(tape: Tape, f: nn.Module, args: Any, kwargs: Any) -> Hashable:
    """Everything that a capture depends on, except the values in memory."""
    leaves, structure = tree_flatten((args, kwargs))
    tensors = [*tape.z0, *(x for x in leaves if isinstance(x, Tensor))]
    own = [*f.parameters(), *f.buffers()]
    return (
        torch.is_grad_enabled(),
        tape.scheme,
        tape.monitor is None,
        str(structure),
        tuple((x.shape, x.stride(), x.dtype, x.device, x.requires_grad) for x in tensors),
        tuple(repr(x) for x in leaves if not isinstance(x, Tensor)),
        tuple((x.data_ptr(), x.requires_grad) for x in own),
        tuple(m.training for m in f.modules()),
        tape.f.settings.key,
    )


class Steps:
    """Captured steps and their static memory."""

    def __init__(self, tape: Tape, spec: Any, f: nn.Module, args: Any, kwargs: Any) -> None:
        self._f, self._spec, scheme = weakref.ref(f), spec, tape.scheme  # f is the key of the dict that contains this
        self.scheme, self._device, self._lock = scheme, tape.z0[0].device, threading.RLock()
        leaves, structure = tree_flatten((args, kwargs))
        self._given = [
            x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in leaves
        ]
        self._args, self._kwargs = tree_unflatten(self._given, structure)
        self.parameters = [p for p in f.parameters() if p.requires_grad]
        self._inputs = [*(x for x in self._given if isinstance(x, Tensor) and x.requires_grad), *self.parameters]
        self.z0 = [x.clone() for x in tape.z0]
        self._copies: tuple[State, State] = ([torch.empty_like(x) for x in self.z0], [x.clone() for x in self.z0])
        self.states = scheme.start_both(self.z0, self.z0)
        self._spilled = [[torch.empty_like(x, dtype=torch.int32) for x in state] for state in self.states]
        y, z = (scheme.bind(i, self.states[i], self._copies[i], 1) for i in (0, 1))
        self._taken = y, z
        self._norms = torch.zeros(2, dtype=self._taken[0][0].sums, device=self._device)
        self._read = [torch.zeros_like(x) for x in self.z0]
        self._undone = tuple(scheme.bind(i, self.states[i], self._read, 1, [[] for _ in self.z0]) for i in (0, 1))
        self._adjoint = Adjoints(self.z0)
        self._totals = [torch.zeros_like(x) for x in self._inputs]
        self._used = [False] * len(self._inputs)
        self._floors = [torch.ones((), device=self._device) for _ in self.z0] if tape.monitor is not None else []
        self._maxima = room_for_maxima([*self._undone[0], *self._undone[1]])
        if torch.is_grad_enabled():
            self._refuse_others()
        both = (False, True) if self._is_exact else (False,)
        back = [(self._back, both), (self._last, (False,))] if torch.is_grad_enabled() else []
        self._recordings: dict[tuple[str, bool], Any] = {}
        with torch.no_grad():
            for take, variants in [(self._forward, both), *back]:
                for spills in variants:
                    take(spills)  # warm-up before the capture
                    recorded = _device.recorded(functools.partial(take, spills), self._device)
                    self._recordings[take.__name__, spills] = recorded

    # Forward

    def solve(self, tape: Tape, args: Any, kwargs: Any) -> End:
        own = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        start, size = tape._start.z, len(self.z0)
        with self._lock:
            results = _Solve.apply(self, tape, size, *start, *own, *self.parameters)
        y, z, y_states, z_states = (list(results[i : i + size]) for i in range(0, 4 * size, size))
        return End(y, z, None, (y_states, z_states))

    def forward(self, tape: Tape, start: Sequence[Tensor], own: Sequence[Tensor]) -> tuple[State, State, State]:
        """Copies of the last y and z in the dtypes of f's input, of the last states, and of the spilled remainders."""
        self.take(start, own)
        for y, z, initial in zip(*self.states, self.scheme.start(start, self.z0), strict=True):
            y.copy_(initial)
            z.copy_(initial)
        for half_step in (h for half_steps in self._taken for h in half_steps):
            if self._is_exact:
                half_step.alarm.zero_()
        spilled: State = []
        tape.norms, tape.half_steps, tape._other, tape._read = self._norms, self._taken, *self._copies
        for spills in self._spilling(tape.options.max_steps):
            self._replay("_forward", spills)
            if spills:
                spilled += [x.clone() for xs in self._spilled for x in xs]
            tape.steps += 1
            if tape.options.tol is not None and tape._has_arrived():
                break
        if tape.options.tol is None:
            self.scheme.check([h for half_steps in self._taken for h in half_steps], in_any=tape.steps)
        tape.norms, tape._other, tape._read, tape.half_steps = self._norms.clone(), [], [], ([], [])
        values, states = ([x.clone() for xs in both for x in xs] for both in (self._copies, self.states))
        return values, states, spilled

    def _spilling(self, steps: int) -> Iterator[bool]:
        """Whether each of this many steps spills remainders."""
        plan = Plan([self.scheme.step] * steps) if self._is_exact else None
        return (plan is not None and plan.spills_before(n) for n in range(steps))

    @property
    def _is_exact(self) -> bool:
        return isinstance(self.scheme, Integers)

    def take(self, start: Sequence[Tensor], own: Sequence[Tensor]) -> None:
        """Copy the values of a solve into static memory."""
        with torch.no_grad():
            for x, z in zip(self.z0, start, strict=True):
                x.copy_(z)
            for x, copy in zip(start, self._copies[1], strict=True):
                copy.copy_(x)
            for static, x in zip((x for x in self._given if isinstance(x, Tensor)), own, strict=True):
                static.copy_(x)

    def _forward(self, spills: bool) -> None:
        step, (y, z) = self.scheme.step, self._copies
        self._prepare(self._taken, spills, done=0)
        with torch.no_grad():
            relax(self._taken[0], self._evaluate(z), z, step)
            self._norms.copy_(relax_norms(self._taken[1], self._evaluate(y), y, step))

    def _evaluate(self, read: State) -> State:
        torch.clear_autocast_cache()  # a cached cast would be part of one graph and missing in another
        f: Any = self._f()
        return flattened(f(structured(read, self._spec), *self._args, **self._kwargs), self.z0, self._spec)

    def _prepare(self, half_steps: Any, spills: bool, done: int) -> None:
        """Reset the half-steps: each step counts as the first one, and spills its remainders or not."""
        if self._is_exact:
            for row, memory in zip(half_steps, self._spilled, strict=True):
                for half_step, x in zip(row, memory, strict=True):
                    half_step.plan, half_step.done = Plan.of_one(self.scheme.step, spills), done
                    half_step._room, half_step.spilled = [x], [x] if done else []

    def _replay(self, name: str, spills: bool) -> Any:
        replay, kept = self._recordings[name, spills]
        replay()
        return kept

    # Backward

    def back(
        self, tape: Tape, saved: Sequence[Tensor], spilled: State, grads: Sequence[Tensor | None]
    ) -> tuple[State, list[Tensor | None]]:
        """The gradients with respect to z0, the arguments and the parameters that require one."""
        size, step, rest = len(self.z0), self.scheme.step, list(spilled)
        for x, own in zip([x for state in self.states for x in state], saved, strict=True):
            x.copy_(own)
        for x, y in zip(self._read, self.scheme.read(self.states[0], self.z0), strict=True):
            x.copy_(y)
        factors = first_factors(step, step)
        self._adjoint.clear()
        self._adjoint.take(grads, factors)
        before = self._adjoint.norms() if self._floors and any(g is not None for g in grads) else None
        for total in self._totals:
            total.zero_()
        magnitudes = [typical_magnitudes(x) for x in self._read] if self._floors else []
        for floor, magnitude in zip(self._floors, magnitudes, strict=True):
            floor.copy_(magnitude[0])
        for n, spills in reversed(list(enumerate(self._spilling(tape.steps)))):
            if spills:
                taken, rest = rest[-2 * size :], rest[: -2 * size]
                for x, own in zip([x for xs in self._spilled for x in xs], taken, strict=True):
                    x.copy_(own)
            outputs, *others = self._replay("_back" if n else "_last", spills)
            if n == tape.steps - 1 and magnitudes and self.scheme.resolution:
                rows = zip(magnitudes, outputs, strict=True)
                magnitudes = [torch.cat([found, typical_magnitudes(x)]) for found, x in rows]
        (products,) = others
        if tape.monitor is not None:
            if before is not None:
                tape.adjoint.sizes = Sizes(before, factors, self._adjoint.norms(), (step.b, step.b))
            assert tape.norms is not None
            tape.monitor.judge([self._maxima], tape.norms, magnitudes, tape.adjoint.sizes)
        by_z0, _ = initial_grads(self._adjoint, products, self.z0, step, step)
        return by_z0, [total.clone() if used else None for total, used in zip(self._totals, self._used, strict=True)]

    def _back(self, spills: bool) -> tuple[State]:
        """Invert a step, with its products. Returns f(y)."""
        self._prepare(self._undone, spills, done=1)
        outputs = []
        for which in (1, 0):
            made, products = self._products(which, self._read)
            outputs.append(made)
            adjoints = self._adjoint.of[1 - which], products, self._adjoint.of[which]
            rows = zip(self._undone[which], made, *adjoints, strict=True)
            for half_step, *tensors in rows:
                half_step.invert_adjoint(*tensors, self.scheme.step, self.scheme.step)
        return (outputs[0],)

    def _last(self, spills: bool) -> tuple[State, State]:
        """Invert the first step, which reconstructs z0. Returns f(y) and the products at z0."""
        step = self.scheme.step
        self._prepare(self._undone, spills, done=1)
        outputs, products = self._products(1, self._read)
        rows = zip(self._undone[1], outputs, self._adjoint.of[0], products, self._adjoint.of[1], strict=True)
        for i, (half_step, out, *adjoints) in enumerate(rows):
            if self._floors:
                half_step.invert_compare(out, self.z0[i], self._floors[i], *adjoints, step, step)
            else:
                half_step.invert_adjoint(out, *adjoints, step, step)
        for x, z in zip(self._read, self.z0, strict=True):
            x.copy_(z)
        made, products = self._products(0, self._read)
        for half_step, out, x, floor in zip(self._undone[0], made, self.z0, self._floors, strict=bool(self._floors)):
            half_step.invert_compare(out, x, floor, None, None, None, step, step)
        return outputs, products

    def _products(self, which: int, read: State) -> tuple[State, State]:
        """The output of f, and its vector-Jacobian products with the adjoint of the state that it updated."""
        leaves = [x.detach().requires_grad_() for x in read]
        with torch.enable_grad():
            outputs = self._evaluate(leaves)
        seeds = [a.to(out.dtype) for a, out in zip(self._adjoint.of[which], outputs, strict=True)]
        grads = torch.autograd.grad(outputs, [*leaves, *self._inputs], seeds, allow_unused=True)
        self._used = [g is not None for g in grads[len(leaves) :]]
        for total, g in zip(self._totals, grads[len(leaves) :], strict=True):
            if g is not None:
                total.add_(g.to_dense())
        return [x.detach() for x in outputs], dense(grads[: len(leaves)], read)

    def _refuse_others(self) -> None:
        """Raise if f depends on a tensor that is neither its argument nor its parameter, whose gradient would be
        lost."""
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in self.z0]
            outputs = self._evaluate(leaves)
        if not any(x.requires_grad for x in outputs):
            raise RuntimeError("f depends on nothing that requires a gradient")
        known = {id(x) for x in (*leaves, *self._inputs)}
        if any(id(x) not in known for x in leaves_behind(outputs)):
            raise RuntimeError("f depends on a tensor that is neither an argument nor a parameter of f: pass it")


class _Solve(torch.autograd.Function):
    """A solve of captured steps, as a function of z0, the tensors in args and kwargs, and the parameters of f."""

    @staticmethod
    def forward(ctx: Any, steps: Steps, tape: Tape, size: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        start, own = tensors[:size], tensors[size : len(tensors) - len(steps.parameters)]
        values, states, spilled = steps.forward(tape, start, own)
        ctx.steps, ctx.tape, ctx.counts = steps, tape, (len(states), len(spilled), size, len(own))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*states)
        ctx.save_for_backward(*states, *spilled, *tensors)
        return (*values, *states)

    @backward
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        refuse_other_derivatives(grads)
        steps, (states, spills, size, own), saved = ctx.steps, ctx.counts, ctx.saved_tensors
        given = saved[states + spills :]
        of_values = grads[: 2 * size]
        with steps._lock:
            steps.take(given[:size], given[size : size + own])
            by_z0, by_inputs = steps.back(ctx.tape, saved[:states], list(saved[states : states + spills]), of_values)
        rest = iter(by_inputs)
        by_rest = [next(rest) if x.requires_grad else None for x in given[size:]]
        return (None, None, None, *by_z0, *by_rest)
