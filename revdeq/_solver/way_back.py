"""The backward pass: inverts the half-steps in reverse order (equation 6 of the paper) and propagates the adjoints
(Algorithm 1), driven by autograd's engine. Only one evaluation's saved tensors exist at a time."""

import functools
import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .. import _device
from ..kernels import reference
from ..kernels.half_step import Coefficients
from .call import AsBefore
from .context import OnceMore
from .monitor import Sizes, apart, typical_magnitudes
from .places import Differentiates, Filling, Home
from .private import current_pass
from .state import State, dense

if TYPE_CHECKING:
    from .tape import Tape


class WayBack:
    """One backward pass through a tape.

    number: torch's id of the pass. at: the number of half-steps between the initial state and the current y and z.
    adjoint: those of y and z, once there is a gradient. They are stored multiplied by b, as the seed of the next
        product; the multiplication by a is fused with the next addition.
    """

    def __init__(self, tape: "Tape", saved: State, grads: Sequence[Tensor | None] | None, keeps: bool) -> None:
        """Takes the saved states, the gradients with respect to the last y and z, if the pass starts there, and whether
        the states and the graph are needed again."""
        self._tape: Tape = weakref.proxy(tape)  # a weak reference, to avoid a cycle
        self._scheme, self.number = tape.scheme, current_pass()
        self.at = 2 * tape.steps
        self._graph_is_kept = keeps
        if keeps:
            saved = [x.clone() for x in saved]
        else:
            increment_version(saved)  # no solve can continue from there
        size, count = len(tape.z0), 2 * tape.steps
        # With per_example: examples that still moved at the last check end here.
        self._ends = None if tape.ends is None else tape.ends.clamp(max=count)
        rest = iter(saved[2 * size :])
        counts = [self._scheme.spills(which, tape.steps) for which in (0, 1)] if len(saved) > 2 * size else [0, 0]
        spilled = [list(itertools.islice(rest, counts[i // size])) for i in range(2 * size)]
        y, z = saved[:size], saved[size : 2 * size]
        self._read = self._scheme.read(y, tape.z0)  # the input of evaluation at - 1
        self._half_steps = (
            self._scheme.bind(0, y, self._read, tape.steps, spilled[:size]),
            self._scheme.bind(1, z, self._read, tape.steps, spilled[size:]),
        )
        self._is_compared = tape.monitor is not None and bool(tape.first == 0 or tape.end)
        self._magnitudes: State = []  # of each tensor of the state, if it is compared
        self.adjoint: tuple[State, State] | None = None
        self._size: Tensor | None = None  # the norm of the incoming gradient
        if grads is not None:
            by_y, by_z = self._scheme.at(count - 2), self._scheme.at(count - 1)
            # Divided by a, because the first addition to y's adjoint multiplies by it, except for frozen examples.
            factor = by_y.b / by_y.a if self._ends is None else by_y.b
            self.adjoint = (
                [scaled(g, factor, x) for g, x in zip(grads[:size], self._read, strict=True)],
                [scaled(g, by_z.b, x) for g, x in zip(grads[size:], self._read, strict=True)],
            )
            if tape.monitor is not None and any(g is not None for g in grads):
                self._size = norm([g for g in grads if g is not None])
        self._has_z0 = False  # what f reads is z0, laid out as z0
        self._outputs: State | None = None  # the outputs of the repeated evaluation
        self._filled = -1  # the evaluation whose saved tensors exist
        self._as_before: AsBefore | None = None
        self._spares_seeds: bool | None = None  # unknown before the first product
        self._seeds: list[tuple[Tensor, int, Tensor]] = []  # the last seeds with their versions, and the adjoints
        self._maxima: State = []
        self._ready: list[Tensor | None] = []  # seeds that were written together with the adjoints
        self._slopes: dict[int, tuple[Tensor, Tensor]] = {}  # of the loss with respect to b and c, by half-step

    def undo(self, home: Home, k: int, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Invert the half-step after half-step k, with the product that has arrived, and evaluate f again. Returns the
        seeds of the next product."""
        if k < 2 * self._tape.first:
            return [None] * len(grads)
        if self._seeds:
            self._look_at_seeds()
        if self._outputs is not None and self.at == k + 2:
            self._undo(grads)
        else:
            self._go_to(home, k + 1)
            self._add(k, grads)
        if self._outputs is None:
            self._evaluate(home)
        if k == 2 * self._tape.first:
            self._arrive()
        return self._seeded(k)

    def reach(self, home: Home, k: int) -> None:
        """Make the saved tensors of evaluation k available."""
        if self._filled != k:
            self._go_to(home, k + 1)
            self._evaluate(home)

    def _go_to(self, home: Home, at: int) -> None:
        """Invert half-steps without products, through which no gradient flows."""
        if self.at < at or (self.at > at and self.adjoint is not None):
            raise RuntimeError(
                "a gradient arrives at an evaluation of f that the backward pass of its solve has not reached yet, or "
                "has "
                "already passed (is a part of f on another device?): call backward for it separately, with "
                "retain_graph=True"
            )
        while self.at > at:
            if self._outputs is None:
                self._evaluate(home)
            k = self.at - 1
            for half_step, out in zip(self._half_steps[k % 2], self._apart(), strict=True):
                if self._ends is not None:
                    half_step.each(self._ends, k)
                half_step.invert(out, self._scheme.at(k))
            self._leave()

    def _add(self, k: int, grads: Sequence[Tensor | None]) -> None:
        """Add gradients from outside to the adjoint of a state."""
        self._ready = []
        for i, g in enumerate(grads):
            if g is not None:
                self._adjoint()[k % 2][i].add_(g.to_dense(), alpha=self._scheme.at(k).b)

    def _adjoint(self) -> tuple[State, State]:
        if self.adjoint is None:
            self.adjoint = [scaled(None, 1, x) for x in self._read], [scaled(None, 1, x) for x in self._read]
        return self.adjoint

    def _undo(self, grads: Sequence[Tensor | None]) -> None:
        """Invert the last half-step, and update the other adjoint with the vector-Jacobian product of f."""
        k, tape, adjoint = self.at - 1, self._tape, self._adjoint()
        step, adjoint_step = self._scheme.at(k), self._scheme.adjoint_at(k - 1, 2 * tape.steps)
        products = dense(grads, self._read)
        outputs, mine = self._apart(), adjoint[1 - k % 2]
        rows = zip(self._half_steps[k % 2], outputs, mine, products, adjoint[k % 2], strict=True)
        # If f computes in another dtype than that of the adjoints, the same kernel writes the next seed. Also with
        # per_example, because frozen examples have a seed of 0.
        self._ready = [
            torch.empty_like(a, dtype=out.dtype) if out.dtype != a.dtype or self._ends is not None else None
            for a, out in zip(mine, outputs, strict=True)
        ]
        if self._ends is not None:
            kept = self._scheme.kept_at(k - 1, 2 * tape.steps)
            for half_step in self._half_steps[k % 2]:
                half_step.each(self._ends, k, kept)
        if tape.learns:
            self._note_slopes(k, self._read, sign=1)
        if k > 1 or not self._is_compared:
            for (half_step, *tensors), seed in zip(rows, self._ready, strict=True):
                half_step.invert_adjoint(*tensors, step, adjoint_step, seed)
        else:
            known = zip(rows, tape.z0, self._floors(), self._ready, strict=True)
            for (half_step, out, *of_adjoint), x, size, seed in known:
                steps = step, adjoint_step
                if self._ends is None:
                    self._maxima.append(half_step.invert_compare(out, x, size, *of_adjoint, *steps, seed))
                else:
                    self._maxima.append(half_step.invert_compare(out, x, size, None, None, None, *steps))
                    own, vjp, other = of_adjoint
                    reference.update_adjoint(own, vjp, other, seed, adjoint_step, reference.taking(half_step))
        if k == 1:  # the initial state is known: use it, not its reconstruction
            for x, initial in zip(self._read, tape.z0, strict=True):
                x.copy_(initial)
            self._has_z0 = all(x.stride() == z.stride() for x, z in zip(self._read, tape.z0, strict=True))
        if tape.learns:
            self._note_slopes(k, self._read, sign=-1)
        self._leave()

    def _note_slopes(self, k: int, x: State, sign: int) -> None:
        """Derivatives of the loss with respect to b_k and c_k, where x_k = (1 - b_k - c_k) x_{k-2} + b_k f + c_k
        x_{k-1}: the inner products of the adjoint of x_k with f - x_{k-2} and with x_{k-1} - x_{k-2}. Called first with
        x_{k-1}, then with x_{k-2}."""
        assert self.adjoint is not None and self._outputs is not None
        adjoint = self.adjoint[k % 2] if self._ends is None else [self._moved(a, k) for a in self.adjoint[k % 2]]
        by_x = inner(adjoint, x)
        if sign > 0:
            self._slopes[k] = inner(adjoint, self._outputs), by_x
        else:
            by_b, by_c = self._slopes[k]
            b = self._scheme.at(k).b
            self._slopes[k] = (by_b - by_x) / b, (by_c - by_x) / b

    def _moved(self, adjoint: Tensor, k: int) -> Tensor:
        """The tensor, with 0 for the examples that half-step k did not move."""
        assert self._ends is not None
        return torch.where((self._ends > k).view(-1, *[1] * (adjoint.dim() - 1)), adjoint, 0)

    def by_coefficients(self) -> Tensor | None:
        """The gradient with respect to every (beta, gamma) of the schedule: b = beta gamma, c = beta (1 - gamma)."""
        tape = self._tape
        if not tape.learns:
            return None
        assert tape.coefficients is not None
        rows = torch.zeros(tape.coefficients.shape, dtype=torch.float64, device=self._read[0].device)
        for k, (by_b, by_c) in self._slopes.items():
            if k < len(rows):
                beta, gamma = self._scheme.at(k).beta, self._scheme.at(k).gamma
                rows[k, 0] = gamma * by_b + (1 - gamma) * by_c
                rows[k, 1] = beta * (by_b - by_c)
        return rows.to(tape.coefficients)

    def _leave(self) -> None:
        """The evaluation whose half-step is undone."""
        self.empty()
        self.at -= 1

    def empty(self) -> None:
        """Free the saved tensors of the last evaluation."""
        tape = self._tape
        if self._filled >= 0 and not (self._graph_is_kept and self._is_kept):
            device = self._read[0].device
            tape.places.empty(self._filled, only=device if tape.places.devices - {device} else None)
        self._filled, self._outputs = -1, None

    def _evaluate(self, home: Home) -> None:
        """Evaluate f again at the input of evaluation at - 1, unless its graph was kept."""
        places, k = self._tape.places, self.at - 1
        kept = places.filled.get(k)
        self._filled, self._is_kept = k, kept is not None and kept.outputs is not None
        self._outputs = kept.outputs if self._is_kept else self._evaluated_again(home, k)  # type: ignore[union-attr]
        assert self._outputs is not None
        if self.at == 2 * self._tape.steps and self._is_compared:
            # A state below its resolution is 0, but the output of f need not be.
            rows = zip(self._read, self._outputs, strict=True) if self._scheme.resolution else zip(self._read)
            self._magnitudes = [typical_magnitudes(*row) for row in rows]

    def _evaluated_again(self, home: Home, k: int) -> State:
        tape, f, places = self._tape, self._tape.f, self._tape.places
        as_before = self._as_before
        if as_before is None:
            as_before = self._as_before = AsBefore(f, places.leaves)

        def evaluated() -> State:
            # With a different layout, f might compute different bits.
            is_own = k > 0 or self._has_z0
            read = self._read if is_own else tape.z0
            if f.changes_its_input or not is_own:
                read = [x.clone() for x in read]
            leaves = [x.detach().requires_grad_() for x in read]
            with as_before, Filling(places, home, k):
                return [x.detach() for x in f([no_leaf(x) for x in leaves] if f.changes_its_input else leaves, k)]

        while True:
            try:
                return evaluated()
            except Differentiates:
                places.needs_versions = True
            except OnceMore:
                continue

    def _arrive(self) -> None:
        """At the initial state, or where the backward pass ends: check the reconstruction."""
        tape, step = self._tape, self._scheme.at(2 * self._tape.first)
        if self._is_compared and tape.first == 0:
            rows = zip(self._half_steps[0], self._apart(), tape.y0, self._floors(), strict=True)
            self._maxima += [h.invert_compare(o, x, s, None, None, None, step, step) for h, o, x, s in rows]
        elif self._is_compared:
            self._maxima += map(apart, self._read, tape.end, self._floors())
        if tape.learns and self.adjoint is not None:
            self._note_slopes(2 * tape.first, self._read, sign=1)
            before = tape.y0 if tape.first == 0 else self._before_turn()
            self._note_slopes(2 * tape.first, before, sign=-1)
        if tape.monitor is not None:
            self._judge()
        if not self._graph_is_kept:
            self._as_before = None
            del tape.f  # free what it captures: there will be no other backward pass

    def _before_turn(self) -> State:
        """The y at which the backward pass ends, which half-step 2 `first` updated."""
        copies = [x.clone() for x in self._read]
        for half_step, out, copy in zip(self._half_steps[0], self._apart(), copies, strict=True):
            half_step.write_to(copy)
            half_step.invert(out, self._scheme.at(2 * self._tape.first))
        return copies

    def _judge(self) -> None:
        """Check the reconstruction, and record the growth of the adjoint."""
        tape = self._tape
        assert tape.monitor is not None and tape.norms is not None
        if self._size is not None and self.adjoint is not None:
            b = self._scheme.at(2 * tape.first).b, self._scheme.at(2 * tape.first + 1).b
            y, z = map(norm, self.adjoint)
            tape.adjoint.sizes = Sizes(self._size, y, z, b)
        of_z = tape.norms if self._ends is None else tape.norms.sum(1).to(self._ends.device)
        tape.monitor.judge(self._maxima, of_z, self._magnitudes, tape.adjoint.sizes)

    def _floors(self) -> State:
        """What errors are relative to, where the state is smaller."""
        return [x[0] for x in self._magnitudes]

    def initial_grads(self, grads: Sequence[Tensor | None], apart: bool) -> tuple[State, State]:
        """The gradients with respect to z0 and y0, or their sum if they are not `apart`. Takes the product of the first
        evaluation."""
        first, second = self._scheme.at(0), self._scheme.at(1)
        same = first is second
        step = second if same else Coefficients(second.a, second.b, first.c * second.b / first.b)
        a = first.a if same else first.a * second.b / first.b
        by_z0, by_y0 = [], []
        for by_y, by_z, g, x in zip(*self._adjoint(), dense(grads, self._read), self._tape.z0, strict=True):
            reference.update_adjoint(by_z, g, by_y, None, step)
            by_z0.append(((by_z if apart else by_z + a * by_y) / second.b).to(x.dtype))
            if apart:
                by_y0.append((a * by_y / second.b).to(x.dtype))
        return by_z0, by_y0

    def _seeded(self, k: int) -> Sequence[Tensor | None]:
        """The adjoints are used as seeds without a copy. A hook or custom function in f that modifies its gradient in
        place would modify them; the first product shows whether that happens."""
        assert self._outputs is not None
        if self.adjoint is None:
            return [None] * len(self._outputs)
        adjoint = self.adjoint[k % 2]
        copy, ready = not self._spares_seeds, self._ready or [None] * len(adjoint)
        self._ready = []
        if self._ends is not None:
            adjoint, copy = [self._moved(a, k) if s is None else a for a, s in zip(adjoint, ready, strict=True)], False
        seeds = [
            a.to(out.dtype, copy=copy) if seed is None or seed.dtype != out.dtype else seed
            for a, out, seed in zip(adjoint, self._outputs, ready, strict=True)
        ]
        if self._ends is None:
            self._seeds = [(x, x._version, a) for x, a in zip(seeds, adjoint, strict=True)]
        return seeds

    def _look_at_seeds(self) -> None:
        if self._spares_seeds is False:
            return
        spared = all(x._version == version for x, version, _ in self._seeds)
        if self._spares_seeds is None:
            self._spares_seeds = spared and all(_equal(x, adjoint) for x, _, adjoint in self._seeds)
        elif not spared:
            raise RuntimeError(
                "f modifies its gradient in place, but not in every evaluation (a hook, or the backward of a custom "
                "function?), which has changed the solver's adjoint: write g.clamp(...) instead of g.clamp_(...)"
            )
        self._seeds = []

    def _apart(self) -> State:
        """f's outputs, copied if needed: f may return one part of its state as another, and half-steps overwrite parts
        in turn."""
        assert self._outputs is not None
        if len(self._outputs) == 1:
            return self._outputs
        memory = {x.untyped_storage().data_ptr() for x in self._read}
        return [out.clone() if out.untyped_storage().data_ptr() in memory else out for out in self._outputs]


def scaled(grad: Tensor | None, factor: float, like: Tensor) -> Tensor:
    wide = torch.promote_types(like.dtype, torch.float32)
    if grad is None:
        return torch.zeros_like(like, dtype=wide)
    result = torch.empty_like(like, dtype=wide)
    return torch.mul(grad, factor, out=result) if grad.dtype == wide else result.copy_(grad).mul_(factor)


def inner(xs: State, ys: State) -> Tensor:
    """The inner product of two states, in float64."""
    products = [(x.double() * y.double()).sum() for x, y in zip(xs, ys, strict=True)]
    return functools.reduce(torch.add, products)


def norm(xs: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all tensors together."""
    norms = [torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)).float() for x in xs]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def _equal(given: Tensor, seed: Tensor) -> bool:
    """Compares values, because autograd does not count all changes, unless that would synchronize."""
    return not _device.can_look(seed) or torch.equal(given, seed.to(given.dtype))


class _NoLeaf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def no_leaf(x: Tensor) -> Tensor:
    """An alias of the memory, which f may modify in place."""
    return _NoLeaf.apply(x)
