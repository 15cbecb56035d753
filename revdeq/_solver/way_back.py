"""The backward pass: inverts the half-steps in reverse order (equation 6 of the paper) and propagates the adjoints
(Algorithm 1), driven by autograd's engine. Only one evaluation's saved tensors exist at a time."""

import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..kernels import reference
from ..kernels.half_step import LANES, Coefficients, chunk_count
from .call import as_before
from .monitor import Sizes, apart, typical_magnitudes
from .norms import inner
from .places import Home
from .private import current_pass
from .state import State, dense, is_dense, two_like

if TYPE_CHECKING:
    from .tape import Tape


class Adjoints:
    """The adjoints of y and z, stored multiplied by b, like the seed of the next product; the multiplication by a is
    fused with the next addition. Those of one tensor share their memory, so that one kernel computes both norms.

    of: those of y (0) and of z (1).
    """

    def __init__(self, like: State) -> None:
        rooms = [two_like(x, wide(x)) for x in like]
        self._pairs = [pair for pair, _ in rooms]
        self.of = [y for _, (y, z) in rooms], [z for _, (y, z) in rooms]
        self.clear()

    def clear(self) -> None:
        for pair in self._pairs:
            pair.zero_()

    def take(self, grads: Sequence[Tensor | None], factors: tuple[float, float]) -> None:
        """Start from the gradients with respect to the last y and z, with a factor for each."""
        size = len(self._pairs)
        for i, (adjoint, g) in enumerate(zip([*self.of[0], *self.of[1]], grads, strict=True)):
            if g is not None:
                scale_to(adjoint, g, factors[i // size])

    def norms(self) -> State:
        """The norms of the adjoints of y and z, for each tensor of the state."""
        return [torch.linalg.vector_norm(pair, dim=1) for pair in self._pairs]


def first_factors(by_y: Any, by_z: Any, frozen: bool = False) -> tuple[float, float]:
    """The factors of the gradients with respect to the last y and z in their adjoints. The first addition to y's
    adjoint multiplies it by a, except for frozen examples."""
    return by_y.b if frozen else by_y.b / by_y.a, by_z.b


class WayBack:
    """One backward pass through a tape.

    number: torch's id of the pass. at: the number of half-steps between the initial state and the current y and z.
    adjoint: those of y and z, once there is a gradient.
    """

    def __init__(self, tape: "Tape", saved: State, grads: Sequence[Tensor | None] | None, keeps: bool) -> None:
        """Takes the saved states, the gradients with respect to the last y and z, if the pass starts there, and whether
        the states and the graph are needed again."""
        self._tape: Tape = weakref.proxy(tape)  # a weak reference, to avoid a cycle
        self._scheme, self._places, self.number = tape.scheme, tape.places, current_pass()
        self._first, self._learns, self._graph_is_kept = 2 * tape.first, tape.learns, keeps
        self._count = self.at = 2 * tape.steps
        if keeps:
            saved = [x.clone() for x in saved]
        else:
            increment_version(saved)  # no solve can continue from there
        size, device = len(tape.z0), tape.z0[0].device
        self._other_devices = tape.places.devices - {device}
        # With per_example: examples that still moved at the last check end here.
        self._ends = None if tape.ends is None else tape.ends.clamp(max=self.at)
        rest = iter(saved[2 * size :])
        counts = [self._scheme.spills(which, tape.steps) for which in (0, 1)] if len(saved) > 2 * size else [0, 0]
        spilled = [list(itertools.islice(rest, counts[i // size])) for i in range(2 * size)]
        y, z = saved[:size], saved[size : 2 * size]
        self._read = self._scheme.read(y, tape.z0)  # the input of evaluation at - 1
        self._half_steps = (
            self._scheme.bind(0, y, self._read, tape.steps, spilled[:size]),
            self._scheme.bind(1, z, self._read, tape.steps, spilled[size:]),
        )
        # What a solve in half precision continues has more bits than the z0 to compare with.
        continues_half = tape.is_continued and any(x.element_size() == 2 for x in tape.z0)
        self._is_compared = tape.monitor is not None and bool(tape.first == 0 or tape.end) and not continues_half
        self._magnitudes: State = []  # of each tensor of the state, if it is compared
        self._maxima: State = []
        self.adjoint: Adjoints | None = None
        self._began: tuple[State, tuple[float, float]] | None = None  # the first norms of the adjoints, with factors
        self._outputs: State | None = None  # the outputs of the repeated evaluation
        self._filled, self._is_kept = -1, False  # the evaluation whose saved tensors exist, and if `keep` stored them
        self._as_before: Any = None
        self._seeds: State = []  # those that were written together with the adjoints
        self._slopes: dict[int, tuple[Tensor, Tensor]] = {}  # of the loss with respect to b and c, by half-step
        if grads is not None:
            self._begin(grads)

    def _begin(self, grads: Sequence[Tensor | None]) -> None:
        last = self._scheme.at(self.at - 2), self._scheme.at(self.at - 1)
        factors = first_factors(*last, frozen=self._ends is not None)
        self.adjoint = Adjoints(self._read)
        self.adjoint.take(grads, factors)
        if self._tape.monitor is not None and any(g is not None for g in grads):
            self._began = self.adjoint.norms(), factors

    def undo(self, home: Home, k: int, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Invert the half-step after half-step k, with the product that has arrived, and evaluate f again. Returns the
        seeds of the next product."""
        if k < self._first:
            return [None] * len(grads)
        if self._outputs is not None and self.at == k + 2:
            self._undo(grads)
        else:
            self._go_to(home, k + 1)
            self._add(k, grads)
        if self._outputs is None:
            self._evaluate(home)
        if k == self._first:
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
                "has already passed (is a part of f on another device?): call backward for it separately, with "
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
            if k == 1:
                self._read_z0()
            self.empty()
            self.at -= 1

    def _add(self, k: int, grads: Sequence[Tensor | None]) -> None:
        """Add gradients from outside to the adjoint of a state."""
        self._seeds = []
        for i, g in enumerate(grads):
            if g is not None:
                self._adjoint()[k % 2][i].add_(g.to_dense(), alpha=self._scheme.at(k).b)

    def _adjoint(self) -> tuple[State, ...]:
        if self.adjoint is None:
            self.adjoint = Adjoints(self._read)
        return self.adjoint.of

    def _undo(self, grads: Sequence[Tensor | None]) -> None:
        """Invert the last half-step, and update the other adjoint with the vector-Jacobian product of f."""
        k, adjoint, ends = self.at - 1, self._adjoint(), self._ends
        step, adjoint_step = self._scheme.at(k), self._scheme.adjoint_at(k - 1, self._count)
        outputs, mine = self._apart(), adjoint[1 - k % 2]
        # The same kernel writes the next seed, in f's dtype: f's graph may modify it.
        self._seeds = [torch.empty_like(a, dtype=out.dtype) for a, out in zip(mine, outputs, strict=True)]
        if ends is not None:
            kept = self._scheme.kept_at(k - 1, self._count)
            for half_step in self._half_steps[k % 2]:
                half_step.each(ends, k, kept)
        if self._learns:
            self._note_slopes(k, self._read, sign=1)
        rows = zip(
            self._half_steps[k % 2], outputs, mine, dense(grads, self._read), adjoint[k % 2], self._seeds, strict=True
        )
        if k > 1 or not self._is_compared:
            for half_step, out, own, vjp, other, seed in rows:
                half_step.invert_adjoint(out, own, vjp, other, step, adjoint_step, seed)
        else:
            self._compare_z(rows, step, adjoint_step)
        if k == 1:
            self._read_z0()
        if self._learns:
            self._note_slopes(k, self._read, sign=-1)
        self.empty()
        self.at -= 1

    def _read_z0(self) -> None:
        """The initial state is known: use it, not its reconstruction."""
        self._read = [h.in_order(x) for h, x in zip(self._half_steps[0], self._tape.z0, strict=True)]
        for half_step, x in zip(self._half_steps[0], self._read, strict=True):
            half_step.write_to(x)  # only read from here on

    def _compare_z(self, rows: Any, step: Any, adjoint_step: Any) -> None:
        """Update the adjoints of y, and compare the reconstruction of z0 with z0."""
        if self._ends is None:
            self._maxima = [room_for_maxima([*self._half_steps[0], *self._half_steps[1]])]
        known = zip(rows, self._tape.z0, self._floors(), strict=True)
        for (half_step, out, own, vjp, other, seed), x, floor in known:
            if self._ends is None:
                half_step.invert_compare(out, x, floor, own, vjp, other, step, adjoint_step, seed)
            else:
                self._maxima.append(half_step.invert_compare(out, x, floor, None, None, None, step, step))
                reference.update_adjoint(own, vjp, other, seed, adjoint_step, reference.taking(half_step))

    def _note_slopes(self, k: int, x: State, sign: int) -> None:
        """Derivatives of the loss with respect to b_k and c_k, where x_k = (1 - b_k - c_k) x_{k-2} + b_k f + c_k
        x_{k-1}: the inner products of the adjoint of x_k with f - x_{k-2} and with x_{k-1} - x_{k-2}. Called first with
        x_{k-1}, then with x_{k-2}."""
        assert self.adjoint is not None and self._outputs is not None
        adjoint = self.adjoint.of[k % 2]
        if self._ends is not None:
            adjoint = [self._moved(a, k) for a in adjoint]
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

    def empty(self) -> None:
        """Free the saved tensors of the last evaluation. If f has parts on other devices, their nodes may run later."""
        if self._filled >= 0 and not (self._graph_is_kept and self._is_kept):
            self._places.empty(self._filled, only=self._read[0].device if self._other_devices else None)
        self._filled, self._outputs = -1, None

    def _evaluate(self, home: Home) -> None:
        """Evaluate f again at the input of evaluation at - 1, unless its graph was kept."""
        k = self.at - 1
        kept = self._places.filled.get(k)
        self._filled, self._is_kept = k, kept is not None and kept.outputs is not None
        self._outputs = kept.outputs if self._is_kept else self._evaluated_again(home, k)  # type: ignore[union-attr]
        assert self._outputs is not None
        if self.at == self._count and self._is_compared:
            self._magnitudes = magnitudes_of(self._scheme, self._read, self._outputs)

    def _evaluated_again(self, home: Home, k: int) -> State:
        f = self._tape.f
        if self._as_before is None:
            self._as_before = as_before(f, self._places.leaves)
        # With a different layout, f might compute different bits.
        read = self._read if k > 0 else [x if is_dense(x) else x.clone() for x in self._tape.z0]
        return self._places.again(home, k, f, read, self._as_before)

    def _arrive(self) -> None:
        """At the initial state, or where the backward pass ends: check the reconstruction."""
        tape, step = self._tape, self._scheme.at(self._first)
        if self._is_compared and tape.first == 0:
            rows = zip(self._half_steps[0], self._apart(), tape.y0, self._floors(), strict=True)
            found = [h.invert_compare(o, x, s, None, None, None, step, step) for h, o, x, s in rows]
            if self._ends is not None or not self._maxima:
                self._maxima += found
        elif self._is_compared:
            self._maxima = list(map(apart, self._read, tape.end, self._floors()))
        if self._learns and self.adjoint is not None:
            self._note_slopes(self._first, self._read, sign=1)
            before = tape.y0 if tape.first == 0 else self._before_turn()
            self._note_slopes(self._first, before, sign=-1)
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
        if self._began is not None and self.adjoint is not None:
            b = self._scheme.at(self._first).b, self._scheme.at(self._first + 1).b
            tape.adjoint.sizes = Sizes(*self._began, self.adjoint.norms(), b)
        of_z = tape.norms if self._ends is None else tape.norms.sum(1).to(self._ends.device)
        tape.monitor.judge(self._maxima, of_z, self._magnitudes, tape.adjoint.sizes)

    def _floors(self) -> State:
        """What errors are relative to, where the state is smaller."""
        return [x[0] for x in self._magnitudes]

    def initial_grads(self, grads: Sequence[Tensor | None], apart: bool) -> tuple[State, State]:
        """The gradients with respect to z0 and y0, or their sum if they are not `apart`. Takes the product of the first
        evaluation."""
        assert self.adjoint is not None
        steps = self._scheme.at(0), self._scheme.at(1)
        return initial_grads(self.adjoint, dense(grads, self._read), self._tape.z0, *steps, apart)

    def _seeded(self, k: int) -> Sequence[Tensor | None]:
        """Seeds in f's dtype, in their own memory: a hook or custom function in f may modify its gradient in place."""
        assert self._outputs is not None
        if self.adjoint is None:
            return [None] * len(self._outputs)
        written, self._seeds = self._seeds, []
        if written and all(seed.dtype == out.dtype for seed, out in zip(written, self._outputs, strict=True)):
            return written
        adjoint = self.adjoint.of[k % 2] if self._ends is None else [self._moved(a, k) for a in self.adjoint.of[k % 2]]
        return [a.to(out.dtype, copy=True) for a, out in zip(adjoint, self._outputs, strict=True)]

    def _apart(self) -> State:
        """f's outputs, copied if needed: f may return one part of its state as another, and half-steps overwrite parts
        in turn."""
        assert self._outputs is not None
        if len(self._outputs) == 1:
            return self._outputs
        memory = {x.untyped_storage().data_ptr() for x in self._read}
        return [out.clone() if out.untyped_storage().data_ptr() in memory else out for out in self._outputs]


def initial_grads(
    adjoint: Adjoints, products: State, z0: State, first: Any, second: Any, apart: bool = False
) -> tuple[State, State]:
    """The gradients with respect to z0 and y0, or their sum if they are not `apart`, from the adjoints after the first
    step and the products of the first evaluation. Takes the coefficients of the first two half-steps."""
    same = first is second
    step = second if same else Coefficients(second.a, second.b, first.c * second.b / first.b)
    a = first.a if same else first.a * second.b / first.b
    by_z0, by_y0 = [], []
    for by_y, by_z, g, x in zip(*adjoint.of, products, z0, strict=True):
        reference.update_adjoint(by_z, g, by_y, None, step)
        by_z0.append(((by_z if apart else by_z + a * by_y) / second.b).to(x.dtype))
        if apart:
            by_y0.append((a * by_y / second.b).to(x.dtype))
    return by_z0, by_y0


def magnitudes_of(scheme: Any, read: State, outputs: State) -> State:
    """The typical magnitudes of each tensor of the state. One below the resolution of its scheme is 0, but the output
    of f need not be."""
    rows = zip(read, outputs, strict=True) if scheme.resolution else zip(read)
    return [typical_magnitudes(*row) for row in rows]


def room_for_maxima(half_steps: list[Any]) -> Tensor:
    """Memory for the results of `invert_compare` of several half-steps, so that one kernel finds the largest."""
    counts = [chunk_count(h.state) for h in half_steps]
    room, begin = half_steps[0].state.new_empty((sum(counts), LANES), dtype=torch.int32), 0
    for half_step, count in zip(half_steps, counts, strict=True):
        half_step.maxima = room[begin : begin + count]
        begin += count
    return room


def wide(x: Tensor) -> torch.dtype:
    """The dtype of adjoints."""
    return torch.promote_types(x.dtype, torch.float32)


def scaled(grad: Tensor | None, factor: float, like: Tensor) -> Tensor:
    result = torch.empty_like(like, dtype=wide(like))
    return result.zero_() if grad is None else scale_to(result, grad, factor)


def scale_to(result: Tensor, grad: Tensor, factor: float) -> Tensor:
    return torch.mul(grad, factor, out=result) if grad.dtype == result.dtype else result.copy_(grad).mul_(factor)
