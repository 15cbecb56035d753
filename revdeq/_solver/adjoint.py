"""The backward pass: inverts the half-steps in reverse order (equation 6 of the paper) and propagates the adjoints
(Algorithm 1), driven by autograd's engine. One evaluation's saved tensors exist at a time.

The adjoints of y and z are stored multiplied by b, as the seeds of the next vector-Jacobian products, and in float32 or
better:

    adjoint_k = a adjoint_{k+2} + b vjp_{k+1} + c adjoint_{k+1}
"""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .check import typical_magnitude
from .evaluation import Evaluation
from .state import State, dense

if TYPE_CHECKING:
    from .iteration import Iteration


class BackwardPass:
    """One backward pass through an iteration.

    number: torch's id of the pass. half_steps: those of y and z, whose copy is `read` for both: what the last of them
    read. at: the number of half-steps that are not yet inverted.
    """

    def __init__(self, iteration: "Iteration", number: int, half_steps: Sequence[list[Any]], read: State) -> None:
        self._iteration: Iteration = weakref.proxy(iteration)
        self._precision, self.number = iteration.precision, number
        self._half_steps, self._read, self._at = half_steps, read, 2 * iteration.steps
        self._context = iteration.f.as_in_forward()  # read once: it does not change within a pass
        self._saved: list[Tensor] = []  # by evaluation at - 1, if it was repeated,
        self._outputs: State | None = None  # and its outputs
        self._adjoints: tuple[State, State] | None = None  # of y and z, once there is a gradient
        self._errors: list[Tensor] = []
        self._floors = [typical_magnitude(x) for x in read] if iteration.check else []

    def at_half_step(self, evaluation: Evaluation, grads: Sequence[Tensor | None]) -> State:
        """Takes the gradient with respect to the result of half-step k. Returns that with respect to f's outputs."""
        k = evaluation.k
        if self._adjoints is None:  # here the gradient begins
            self.reach(evaluation)
            assert self._outputs is not None
            self._adjoints = tuple([torch.zeros_like(x, dtype=_wide(x)) for x in self._read] for _ in range(2))
            for adjoint, g in zip(self._adjoints[k % 2], grads, strict=True):
                if g is not None:
                    adjoint.add_(g, alpha=self._precision.at(k).b)
            # In their own memory: a hook or custom function in f may modify its gradient in place.
            seeds = [x.to(out.dtype, copy=True) for x, out in zip(self._adjoints[k % 2], self._outputs, strict=True)]
        else:
            if self._at != k + 2:
                raise RuntimeError(PASSED)
            seeds = self._undo(k + 1, grads)
            self._evaluate(evaluation)
        if k == self._iteration.first:
            self._compare_start(k)
        return seeds

    def reach(self, evaluation: Evaluation) -> None:
        """Have the saved tensors of an evaluation, to which no gradient flows through the half-steps after it."""
        if self._at < evaluation.k + 1 or (self._at > evaluation.k + 1 and self._adjoints is not None):
            raise RuntimeError(PASSED)
        while self._at > evaluation.k + 1:
            k = self._at - 1
            self._invert(k, self._evaluate(Evaluation(k, None)))
            self._went_back()
        self._evaluate(evaluation)

    def by_initial(self) -> tuple[State, State]:
        """The gradients with respect to z0 and y0, without that through f(z0)."""
        assert self._adjoints is not None
        first, second = self._precision.at(0), self._precision.at(1)
        by_y0 = [x * (first.a / first.b) for x in self._adjoints[0]]
        by_z0 = [
            torch.add(z * (second.a / second.b), y, alpha=first.c / first.b)
            for y, z in zip(*self._adjoints, strict=True)
        ]
        return by_z0, by_y0

    def _evaluate(self, evaluation: Evaluation) -> State:
        """Evaluate f again at the input of evaluation at - 1, unless its tensors exist."""
        if self._outputs is None:
            outputs = evaluation.outputs
            if outputs is None:
                with self._context():
                    outputs = evaluation.repeat(self._iteration, self._read)
            self._saved, evaluation.outputs = evaluation.saved, None
            if len(outputs) > 1:  # f may return one part of its state as another, which is overwritten first
                memory = {x.untyped_storage().data_ptr() for x in self._read}
                outputs = [x.clone() if x.untyped_storage().data_ptr() in memory else x for x in outputs]
            self._outputs = outputs
        return self._outputs

    def _invert(self, k: int, outputs: State) -> None:
        for half_step, out, read in zip(self._half_steps[k % 2], outputs, self._read, strict=True):
            half_step.invert(out, read, read)

    def _undo(self, k: int, grads: Sequence[Tensor | None]) -> State:
        """Invert half-step k, and update the other state's adjoint with the product of f in the same pass over memory.
        Returns the next seeds."""
        assert self._outputs is not None and self._adjoints is not None
        other, mine = self._adjoints[k % 2], self._adjoints[1 - k % 2]
        products = dense(grads, self._read)
        seeds = [torch.empty_like(a, dtype=out.dtype) for a, out in zip(mine, self._outputs, strict=True)]
        compares = k == 1 and self._iteration.check is not None
        for i, half_step in enumerate(self._half_steps[k % 2]):
            adjoints, read = (mine[i], products[i], other[i], seeds[i]), self._read[i]
            if compares:
                known = self._outputs[i], read, self._iteration.z0[i], self._floors[i]
                self._errors.append(half_step.invert_compare(*known, *adjoints))
            else:
                half_step.invert_adjoint(self._outputs[i], read, read, *adjoints)
        self._went_back()
        return seeds

    def _went_back(self) -> None:
        """After a half-step was inverted, f's tensors are no longer needed."""
        self._at -= 1
        self._saved.clear()
        self._outputs = None
        if self._at == 1:  # the initial state is known: use it, not its reconstruction
            self._read = self._iteration.z0  # only read from here on

    def _compare_start(self, k: int) -> None:
        """Where the graph begins, check the reconstruction of y0; that of z0 was checked before."""
        iteration = self._iteration
        if iteration.check is None or not self._errors:
            return
        assert self._outputs is not None
        known = zip(self._half_steps[0], self._outputs, self._read, iteration.y0, self._floors, strict=True)
        for half_step, out, read, x, floor in known:
            self._errors.append(half_step.invert_compare(out, read, x, floor))
        iteration.check.judge(self._errors, iteration.norms)


PASSED = (
    "a gradient arrives at an evaluation of f that the backward pass of its solve has not reached yet, or has already "
    "passed (is a part of f on another device?): call backward for it separately, with retain_graph=True"
)


def _wide(x: Tensor) -> torch.dtype:
    """The dtype of adjoints."""
    return torch.promote_types(x.dtype, torch.float32)
