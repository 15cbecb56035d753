"""The way back: half-steps are undone in the opposite order (equation 6 of the paper) while the adjoints follow
(Algorithm 1), as the engine asks for it. One evaluation's tensors are there at a time."""

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import _device
from ..kernels import reference
from ..kernels.backends import together
from .call import AsBefore
from .monitor import apart, typical_magnitude
from .places import Differentiates, Evaluation, Filling, Noting
from .private import current_pass, graph_is_kept
from .state import State, dense

if TYPE_CHECKING:
    from .tape import Tape


class WayBack:
    """One backward pass through a tape.

    number: torch's, of the pass. at: how many half-steps y and z are ahead of the initial state.
    adjoint: of y and of z, as soon as there is a gradient. It is kept multiplied by b, to be the seed of the next
        product, and its decay by a waits for the pass over memory that adds to it.
    """

    def __init__(self, tape: "Tape", saved: State, grads: Sequence[Tensor | None] | None) -> None:
        """Takes the states that were saved, and the gradients by the last y and z, if the pass comes from there."""
        self._tape: Tape = weakref.proxy(tape)  # which holds this
        self._scheme, self.number = tape.scheme, current_pass()
        self.at = 2 * tape.steps
        self._graph_is_kept = grads is None or graph_is_kept()
        if self._graph_is_kept:
            saved = [x.clone() for x in saved]
        size, step = len(tape.initial), self._scheme.step
        spills = len(saved) // (2 * size) - 1
        spilled = [saved[2 * size + i * spills :][:spills] for i in range(2 * size)]
        y, z = saved[:size], saved[size : 2 * size]
        self._read = self._scheme.read(y, tape.initial)  # what f read in evaluation at - 1
        self._half_steps = (
            self._scheme.bind(y, self._read, tape.steps, spilled[:size]),
            self._scheme.bind(z, self._read, tape.steps, spilled[size:]),
        )
        is_compared = tape.monitor is not None and (tape.first == 0 or tape.end)
        self._sizes = [typical_magnitude(x) for x in self._read] if is_compared else []
        self._seen = self._sizes
        self.adjoint: tuple[State, State] | None = None
        if grads is not None:  # the first pass that adds to y's adjoint must find it divided by a
            self.adjoint = (
                [scaled(g, step.b / step.a, x) for g, x in zip(grads[:size], self._read, strict=True)],
                [scaled(g, step.b, x) for g, x in zip(grads[size:], self._read, strict=True)],
            )
        self._outputs: State | None = None  # what it returned, once it was evaluated again
        self._filled: Callable[[], Evaluation | None] = lambda: None  # whose tensors are there; the graph holds it
        self._as_before: AsBefore | None = None
        self._spares_seeds: bool | None = None  # not known before the first product
        self._seeds: list[tuple[Tensor, int, Tensor]] = []  # the last ones, with their versions, and the adjoints
        self._maxima: State = []

    def undo(self, evaluation: Evaluation, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Undoes the half-step after the one that follows this evaluation, with the product that has come, and
        evaluates f again. Returns the seeds of the next product."""
        k = evaluation.k
        if k < 2 * self._tape.first:
            return [None] * len(grads)
        self._look_at_seeds()
        if self._outputs is not None and self.at == k + 2:
            self._undo(grads)
        else:
            self._go_to(k + 1)
            self._add(k % 2, grads)
        if self._outputs is None:
            self._evaluate(evaluation)
        if k == 2 * self._tape.first:
            self._arrive()
        return self._seeded(k % 2)

    def reach(self, evaluation: Evaluation) -> bool:
        """Whether this evaluation is to be differentiated. Its tensors are there then."""
        if evaluation.k < 2 * self._tape.first:
            return False
        if self._filled() is not evaluation:
            self._go_to(evaluation.k + 1)
            self._evaluate(evaluation)
        return True

    def _go_to(self, at: int) -> None:
        """Undoes half-steps without products: those that no gradient comes through."""
        if self.at < at or (self.at > at and self.adjoint is not None):
            raise RuntimeError(
                "a gradient arrives at an evaluation of f that the backward pass of its solve has not come to yet, or "
                "has left behind (is there a part of f on another device?): call backward for it by itself, with "
                "retain_graph=True"
            )
        while self.at > at:
            if self._outputs is None:
                self._evaluate(Evaluation(None, self.at - 1))
            for half_step, out in zip(self._half_steps[(self.at - 1) % 2], self._apart(), strict=True):
                half_step.invert(out, self._scheme.step)
            self._leave()

    def _add(self, which: int, grads: Sequence[Tensor | None]) -> None:
        """To the adjoint of a state, gradients that have come to it from outside."""
        for i, g in enumerate(grads):
            if g is not None:
                self._adjoint()[which][i].add_(g.to_dense(), alpha=self._scheme.step.b)

    def _adjoint(self) -> tuple[State, State]:
        if self.adjoint is None:
            self.adjoint = [scaled(None, 1, x) for x in self._read], [scaled(None, 1, x) for x in self._read]
        return self.adjoint

    def _undo(self, grads: Sequence[Tensor | None]) -> None:
        """The last half-step, and with the product of its adjoint with the Jacobian of f, the other adjoint."""
        k, step, adjoint = self.at - 1, self._scheme.step, self._adjoint()
        products = dense(grads, self._read)
        rows = zip(self._half_steps[k % 2], self._apart(), adjoint[1 - k % 2], products, adjoint[k % 2], strict=True)
        with together(len(products)):
            if k > 1 or not self._sizes:
                for half_step, out, a, product, other in rows:
                    half_step.invert_adjoint(out, a, product, other, step, step)
            else:
                for (half_step, out, *of_adjoint), x, size in zip(rows, self._tape.initial, self._sizes, strict=True):
                    self._maxima.append(half_step.invert_compare(out, x, size, *of_adjoint, step, step))
        if k == 1:  # the initial state is known: use it, not its reconstruction
            for x, initial in zip(self._read, self._tape.initial, strict=True):
                x.copy_(initial)
        self._leave()

    def _leave(self) -> None:
        """The evaluation whose half-step is undone."""
        self.empty()
        self.at -= 1

    def empty(self) -> None:
        """Forget the tensors of the last evaluation."""
        evaluation = self._filled()
        if evaluation is not None and not (self._graph_is_kept and evaluation.values is not None):
            device = self._read[0].device
            evaluation.empty(only=device if self._tape.notes.devices - {device} else None)
        self._filled, self._outputs = lambda: None, None

    def _evaluate(self, evaluation: Evaluation) -> None:
        """f once more where evaluation at - 1 was, unless what it saved was kept."""
        self._filled, self._outputs = weakref.ref(evaluation), evaluation.values
        if self._outputs is None:
            self._outputs = self._evaluated_again(evaluation)
        if self.at == 2 * self._tape.steps and self._sizes and self._scheme.resolution:
            # A state too small for its own resolution is 0; what f made of it need not be.
            sizes = zip(self._sizes, map(typical_magnitude, self._outputs), strict=True)
            self._seen = [torch.maximum(*pair) for pair in sizes]

    def _evaluated_again(self, evaluation: Evaluation) -> State:
        tape, f, notes = self._tape, self._tape.f, self._tape.notes
        as_before = self._as_before
        if as_before is None:
            as_before = self._as_before = f.as_before([leaf for leaf, _ in notes.leaves.values()])

        def evaluated() -> State:
            # In another layout than it had at first, f could compute other bits than it did.
            read = tape.initial if self.at == 1 else self._read
            if f.changes_its_input or self.at == 1:
                read = [x.clone() for x in read]
            leaves = [x.detach().requires_grad_() for x in read]
            hooks: Any = Noting(evaluation, notes, again=True) if notes.needed else Filling(evaluation, notes)
            with as_before, hooks if evaluation.is_recorded else contextlib.nullcontext():
                return [x.detach() for x in f([_no_leaf(x) for x in leaves] if f.changes_its_input else leaves)]

        tape.evaluating = True
        try:
            outputs = evaluated()
        except Differentiates:
            notes.needed = True
            outputs = evaluated()
        finally:
            tape.evaluating = False
        return outputs

    def _arrive(self) -> None:
        """At the initial state, or where the way back ends: the verdict."""
        tape, step = self._tape, self._scheme.step
        if self._sizes and tape.first == 0:
            rows = zip(self._half_steps[0], self._apart(), tape.initial, self._sizes, strict=True)
            with together(len(self._read)):
                self._maxima += [h.invert_compare(o, x, s, None, None, None, step, step) for h, o, x, s in rows]
        elif self._sizes:
            self._maxima += map(apart, self._read, tape.end, self._sizes)
        if tape.monitor is not None:
            assert tape.norms is not None
            tape.monitor.judge(self._maxima, tape.norms, self._seen)
        if not self._graph_is_kept:
            self._as_before = None
            del tape.f  # and what it closes over: there will be no other backward pass

    def initial_grads(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """z_0 starts both y and z. Takes the product of the first evaluation."""
        step, result = self._scheme.step, []
        for by_y, by_z, g, x in zip(*self._adjoint(), dense(grads, self._read), self._tape.initial, strict=True):
            reference.update_adjoint(by_z, g, by_y, step)
            result.append(((by_z + step.a * by_y) / step.b).to(x.dtype))
        return result

    def _seeded(self, which: int) -> Sequence[Tensor | None]:
        """The adjoints themselves are the seeds. A hook or a custom function in f that changes its gradient in place
        would change them: after the first product it is known whether that happens."""
        assert self._outputs is not None
        if self.adjoint is None:
            return [None] * len(self._outputs)
        adjoint = self.adjoint[which]
        copy = not self._spares_seeds
        seeds = [a.to(out.dtype, copy=copy) for a, out in zip(adjoint, self._outputs, strict=True)]
        self._seeds = [(x, x._version, a) for x, a in zip(seeds, adjoint, strict=True)]
        return seeds

    def _look_at_seeds(self) -> None:
        if not self._seeds or self._spares_seeds is False:
            return
        spared = all(x._version == version for x, version, _ in self._seeds)
        if self._spares_seeds is None:
            self._spares_seeds = spared and all(_equal(x, adjoint) for x, _, adjoint in self._seeds)
        elif not spared:
            raise RuntimeError(
                "f changes its gradient in place, and not in every evaluation (a hook, or the backward of a custom "
                "function?), so that the solver's own adjoint was changed: write g.clamp(...) in place of g.clamp_(...)"
            )
        self._seeds = []

    def _apart(self) -> State:
        """f's outputs. It may return one part of its state as another, and the half-steps overwrite one part after the
        other."""
        assert self._outputs is not None
        if len(self._outputs) == 1:
            return self._outputs
        memory = {x.untyped_storage().data_ptr() for x in self._read}
        return [out.clone() if out.untyped_storage().data_ptr() in memory else out for out in self._outputs]


def scaled(grad: Tensor | None, factor: float, like: Tensor) -> Tensor:
    wide = torch.promote_types(like.dtype, torch.float32)
    if grad is None:
        return torch.zeros_like(like, dtype=wide)
    return torch.empty_like(like, dtype=wide).copy_(grad).mul_(factor)


def _equal(given: Tensor, seed: Tensor) -> bool:
    """Also after a change that autograd does not count, unless a look would wait for the device."""
    return not _device.can_look(seed) or torch.equal(given, seed.to(given.dtype))


class _NoLeaf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _no_leaf(x: Tensor) -> Tensor:
    """The same memory, which f may change in place."""
    return _NoLeaf.apply(x)
