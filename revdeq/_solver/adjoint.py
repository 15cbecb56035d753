"""The backward pass: inverts the half-steps in reverse order (equation 6 of the paper) and propagates the adjoints
(Algorithm 1), driven by autograd's engine. One evaluation's saved tensors exist at a time.

The adjoints of y and z are stored multiplied by b, as the seeds of the next vector-Jacobian products, and in float32 or
better:

    adjoint_k = a adjoint_{k+2} + b vjp_{k+1} + c adjoint_{k+1}
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..kernels.half_step import wide
from .check import typical_magnitude
from .evaluation import Evaluation
from .state import State, dense

if TYPE_CHECKING:
    from .iteration import Iteration

Gradients = Sequence[Tensor | None]


class BackwardPass:
    """One backward pass through an iteration.

    half_steps: those of y and z. The last one that is not yet inverted is at - 1, and it read `read`. evaluation: which
    was repeated last, with its outputs. adjoints: those of y and z, once there is a gradient.
    """

    def __init__(self, iteration: "Iteration", half_steps: Sequence[list[Any]]) -> None:
        self._half_steps, self._at = half_steps, 2 * iteration.steps
        self._f, self._step, self._check = iteration.f, iteration.precision.step, iteration.check
        self._z0, self._y0, self._norms = iteration.z0, iteration.y0, iteration.norms
        self._read = [h.decoded(x.dtype).requires_grad_() for h, x in zip(half_steps[0], self._z0, strict=True)]
        self._context = self._f.as_in_forward()  # read once: it does not change within a pass
        self.evaluation = Evaluation(self._at)
        self._outputs: State | None = None
        self.adjoints: list[State] | None = None
        self._entering: dict[int, Gradients] = {}
        self._maxima: list[Tensor] = []
        self._floors = [typical_magnitude(x) for x in self._read] if self._check else []
        self._statistics = iteration.statistics
        self._statistics.last = []

    def enter(self, k: int, grads: Gradients) -> None:
        """Take the gradient of a loss with respect to the result of half-step k."""
        self._entering[k] = [None if g is None else dense(g, g) for g in grads]

    def at_half_step(self, evaluation: Evaluation, products: Gradients) -> Gradients:
        """Take the gradient of the result of half-step k that came through the next evaluation of f. Return that of f's
        outputs."""
        k = evaluation.k
        entering = self._entering.pop(k, None)
        if self.adjoints is not None:
            if self._at != k + 2:
                raise RuntimeError(PASSED)
            seeds = self._undo(k + 1, [dense(g, x) for g, x in zip(products, self._read, strict=True)])
            self._evaluate(evaluation)
            if entering is not None:
                seeds = self._add(k, entering)
        elif all(g is None for g in (*products, *(entering or ()))):
            return products
        else:  # here the gradient begins
            self.reach(evaluation)
            self.adjoints = [[torch.zeros_like(x, dtype=wide(x.dtype)) for x in self._read] for _ in range(2)]
            products = [None if g is None else dense(g, g) for g in products]
            seeds = self._add(k, products)
            if entering is not None:
                seeds = self._add(k, entering)
            if self._check:
                others = [g for grads in (entering or (), *self._entering.values()) for g in grads]
                self._statistics.last = _norms([*products, *others])
        if k == 0 and self._check and self._maxima:
            self._compare_start()
        return seeds

    def reach(self, evaluation: Evaluation) -> None:
        """Have the saved tensors of an evaluation, to which no gradient flows through the half-steps after it."""
        if self._at < evaluation.k + 1 or (self._at > evaluation.k + 1 and self.adjoints is not None):
            raise RuntimeError(PASSED)
        while self._at > evaluation.k + 1:
            outputs = self._evaluate(Evaluation(self._at - 1))
            self._invert(self._at - 1, outputs)
            self._went_back()
        self._evaluate(evaluation)

    def by_initial(self) -> tuple[State, State]:
        """The gradients with respect to z0 and y0, without that through f(z0)."""
        assert self.adjoints is not None
        kept, mixed = self._step.a / self._step.b, self._step.c / self._step.b
        by_y0 = [x * kept for x in self.adjoints[0]]
        by_z0 = [torch.add(z * kept, y, alpha=mixed) for y, z in zip(*self.adjoints, strict=True)]
        return by_z0, by_y0

    def _add(self, k: int, grads: Gradients) -> State:
        """Add a gradient to the adjoint of the result of half-step k. Return the seeds."""
        assert self.adjoints is not None and self._outputs is not None
        for adjoint, g in zip(self.adjoints[k % 2], grads, strict=True):
            if g is not None:
                adjoint.add_(g, alpha=self._step.b)
        # In their own memory: a hook or custom function in f may modify its gradient in place.
        return [x.to(out.dtype, copy=True) for x, out in zip(self.adjoints[k % 2], self._outputs, strict=True)]

    def _evaluate(self, evaluation: Evaluation) -> State:
        """Evaluate f again at the input of evaluation at - 1, unless its tensors exist."""
        if self._outputs is None:
            if evaluation.outputs is None:
                with self._context():
                    outputs = evaluation.repeat(self._f, self._read)
            else:
                outputs = evaluation.take_kept()
            self.evaluation = evaluation
            if len(outputs) > 1:  # f may return one part of its state as another, which is overwritten first
                memory = {x.untyped_storage().data_ptr() for x in self._read}
                outputs = [x.clone() if x.untyped_storage().data_ptr() in memory else x for x in outputs]
            self._outputs = outputs
        return self._outputs

    def _invert(self, k: int, outputs: State) -> None:
        for h, out, x in zip(self._half_steps[k % 2], outputs, self._read, strict=True):
            h.invert(out, x, x)

    def _undo(self, k: int, products: State) -> State:
        """Invert half-step k, and update the other state's adjoint with the product of f in the same pass over memory.
        Return the next seeds."""
        assert self._outputs is not None and self.adjoints is not None
        mine, other = self.adjoints[1 - k % 2], self.adjoints[k % 2]
        seeds = []
        for i, half_step in enumerate(self._half_steps[k % 2]):
            out, x = self._outputs[i], self._read[i]
            seeds.append(torch.empty_like(mine[i], dtype=out.dtype))
            adjoints = mine[i], products[i], other[i], seeds[i]
            if k == 1 and self._check:
                self._maxima.append(half_step.invert_compare(out, x, self._z0[i], self._floors[i], *adjoints))
            else:
                half_step.invert_adjoint(out, x, x, *adjoints)
        self._went_back()
        return seeds

    def _went_back(self) -> None:
        """After a half-step was inverted, f's tensors are no longer needed."""
        self._at -= 1
        if self._f.spreads:  # nodes on another device run in another thread, and may need theirs at any time
            here = self._read[0].device
            for place in [place for place, x in self.evaluation.items() if x.device == here]:
                del self.evaluation[place]
        else:
            self.evaluation.clear()
        self._outputs = None
        if self._at == 1:
            self._read = self._z0  # it is known: use it, not its reconstruction

    def _compare_start(self) -> None:
        """At the first half-step, check the reconstruction of y0; that of z0 was checked before."""
        assert self._check is not None and self._outputs is not None and self.adjoints is not None
        given = self._half_steps[0], self._outputs, self._read, self._y0, self._floors
        self._maxima += [h.invert_compare(out, x, y, floor) for h, out, x, y, floor in zip(*given, strict=True)]
        statistics = self._statistics
        statistics.first, statistics.b = _norms([*self.adjoints[0], *self.adjoints[1]]), abs(self._step.b)
        self._check.judge(self._maxima, self._norms, statistics)


PASSED = (
    "a gradient arrives at an evaluation of f that the backward pass of its solve has not reached yet, or has already "
    "passed (is a part of f on another device?): call backward for it separately, with retain_graph=True"
)


def _norms(xs: Gradients) -> State:
    return [torch.linalg.vector_norm(x) for x in xs if x is not None]
