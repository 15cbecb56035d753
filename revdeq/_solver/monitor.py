"""Detects when the backward pass failed to reconstruct the forward pass.

The backward pass arrives at the initial state, which is known, and compares. The error of each element is taken
relative to its own magnitude after the first step, or to the typical magnitude of its tensor where that is larger,
and the largest of these, rho, is judged. Over 974 runs of MLPs, conv and transformer blocks the error of the
reconstruction, relative to the largest state, bounded that of the gradient: <= 1e-5 came with a gradient error of at
most 6e-7, <= 1e-4 with 3e-5, and above 1e-2 there was none. rho is never smaller than that error.

It sees every element of every tensor of the state, each on its own scale: neither a large feature nor a large tensor
hides an error elsewhere. It does not see an error in elements much smaller than what is typical of their tensor, nor
one that f forgets on the way back, so that the pass still arrives: `revdeq.verify` compares every evaluation.
"""

import functools
import itertools
import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .deferred import report

CHECKS = ("warn", "raise", None)

LIMIT = 1e-4
"""The largest rho that passes: beyond it the gradient may be off by more than 3e-5."""

MOVING = 0.5
"""A relative change in the last step beyond which an iteration is not on its way to a fixed point."""

COARSE = 1e-3
"""How large a rounding may be, relative to a typical number, without a word. Where a signal fades, as along a graph,
half of a state may be smaller than is typical and do no harm."""

ATOMICS = (
    "On a GPU, index_add, scatter and the like add up in any order: torch.use_deterministic_algorithms(True) replaces "
    "them, or names those that it cannot"
)

UNSETTLED = 0.1
"""The largest relative change of an adjoint in its last step that passes: a gradient that moves by a tenth is one that
stochastic gradients hide."""


LARGEST_GROWTH = 1000.0
"""The growth of the adjoint, from the last step to the first, that passes without a warning. Where f contracts, it
shrinks; with a Jacobian that is not normal it may grow first. Models that learn well had up to 250 when their training
began (convolutions for images, mazes); a recursive model that learnt nothing had 2,000."""


class ReconstructionWarning(UserWarning):
    """The backward pass could not reconstruct the forward pass, so its gradient cannot be trusted.

    The message gives the size of the error and the remedies. It is given once for each line that calls `solve`.
    """


class ReconstructionError(RuntimeError):
    """What `ReconstructionWarning` says, raised with check="raise"."""


class ConvergenceWarning(UserWarning):
    """The iteration does not converge: y and z settle at different points, the gradient explodes, or the backward pass
    of gradient="implicit" did not solve the adjoint equation. The message says which, and what helps."""


class ConvergenceError(RuntimeError):
    """What `ConvergenceWarning` says, raised with check="raise"."""


@dataclass
class Adjoint:
    """What the backward pass of a solve did, once it has run.

    Attributes:
        growth: By how much the adjoint grew from the last step to the first, a 0-d tensor: the norm of the gradient by
            the states of the first step over that by the last states. Where it is large f expands, and gradients
            explode. None where `check` is.
        steps: With gradient="implicit", the number of steps it took, each with two products.
        change: With gradient="implicit", the relative change of the adjoint in the last of them, a 0-d tensor.
        norms: Those that `growth` compares, of the gradient by the last states and by the states of the first step.
    """

    steps: int | None = None
    change: Tensor | None = None
    norms: Tensor | None = None

    @property
    def growth(self) -> Tensor | None:
        return None if self.norms is None else self.norms[1] / self.norms[0]


@dataclass(frozen=True)
class Monitor:
    """What to do about a reconstruction, and what to say.

    On the CPU the verdict is in at the end of the backward pass. On other devices it is deferred.
    """

    check: str
    site: tuple[str, int]
    setting: str
    state: str
    resolution: float
    remedy: str

    def judge(self, maxima: Sequence[Tensor], norms: Tensor, sizes: Sequence[Tensor], grads: Tensor | None) -> None:
        """Takes the partial maxima of `invert_compare`, the squared norms of the last change of z and of z, the typical
        magnitude of each tensor of the state, and the norms of the adjoint after the last step and after the first."""
        filled = [m.flatten() for m in maxima if m.numel()]
        if not filled:
            return
        rho = torch.cat(filled).amax().view(torch.float32)
        if grads is None:
            grads = torch.ones(2, device=rho.device)
        report(torch.cat([rho.view(1), grads, norms, *(size.view(1) for size in sizes)]), self._decide)

    def _decide(self, values: Tensor) -> None:
        rho, before, after, change, value, *sizes = values.tolist()
        change, value = math.sqrt(change), math.sqrt(value)
        coarse = [size for size in sizes if 2 * SMALLEST_SCALE < size < self.resolution / COARSE]
        if coarse:
            text = (
                f"the exact state resolves {self.resolution:.0e}, which is coarse for numbers of a typical size of "
                f"{min(coarse):.1e}: the solution and its gradient may be off by {self.resolution / min(coarse):.0e} "
                f"({self.setting}). Scale z, in f, to a size of about 1, or use state=revdeq.Exact(fraction_bits=30) "
                'or state="float64"'
            )
            self._tell("coarse", text, ReconstructionError, ReconstructionWarning)
        if rho <= LIMIT:
            if math.isfinite(before):  # a scaled loss may overflow, which its scaler looks for
                self._decide_growth(before, after)
            return
        again = "f does not compute the same when it is called again (a counter in f? use indexed=True)"
        cause = f"{self.remedy}{again}. {ATOMICS}"
        if self.state == "float64" and not change <= MOVING * value:
            cause = (
                f"The iteration does not converge: z is of size {value:.1e}, and its last step changed it by "
                f"{change:.1e}, which a float64 state cannot undo. Find better coefficients with revdeq.tune, or "
                "normalise what f returns"
            )
        text = (
            f"the backward pass failed to reconstruct z0: the relative error is {rho:.1e}, where {LIMIT:.0e} can be "
            f"trusted ({self.setting}), and so the gradient of this solve is not exact. "
            f"{cause}"
        )
        self._tell("lost", text, ReconstructionError, ReconstructionWarning)

    def _decide_growth(self, before: float, after: float) -> None:
        if not math.isfinite(after):
            text = (
                f"the gradient is not finite after the first step, and was of size {before:.1e} at the last "
                f"({self.setting}): f expands, so that gradients explode. Take fewer steps, damp f with a gamma below "
                "1, or differentiate the last steps only (backward_steps)"
            )
            self._tell("not finite", text, ConvergenceError, ConvergenceWarning)
        elif after > LARGEST_GROWTH * before:
            text = (
                f"the gradient grew {after / before:.1e} times from the last step to the first ({self.setting}): it is "
                "exact, but f expands, so that it explodes with more steps and hides what the last steps would learn. "
                "Damp f with a gamma below 1 (0.25 to 0.5), take fewer steps, or differentiate the last ones only "
                "(backward_steps)"
            )
            self._warn("growth", text, ConvergenceWarning)

    def judge_gap(self, gap: Tensor, tol: float) -> None:
        """Takes the relative distance of y and z where neither changes by more than tol any more."""
        distance = gap.item()
        if distance > math.sqrt(tol):
            text = (
                f"y and z settle at two different points, {distance:.1e} of their size apart ({self.setting}): z is no "
                "fixed point, and f attracts to none with these coefficients. Try a gamma below 1, or revdeq.tune"
            )
            self._tell("gap", text, ConvergenceError, ConvergenceWarning)

    def judge_same(self, now: Sequence[Tensor], before: Sequence[Tensor]) -> None:
        """Of gradient="implicit": what f returned last, in the backward pass and in the forward pass."""
        if now[0].numel() == 0:
            return
        worst = [((x - y).float().abs().amax(), y.float().abs().amax()) for x, y in zip(now, before, strict=True)]
        report(torch.stack([torch.stack(pair) for pair in worst]), self._decide_same)

    def _decide_same(self, values: Tensor) -> None:
        for distance, size in values.tolist():
            if not distance <= LIMIT * size:
                text = (
                    f"f does not compute in the backward pass what it did in the forward pass: its last result is off "
                    f"by {distance:.1e}, of numbers up to {size:.1e} ({self.setting}), so that the gradient is that of "
                    "another f. Leave what f closes over and reads as it is until the backward pass"
                )
                self._tell("changed", text, ReconstructionError, ReconstructionWarning)

    def judge_convergence(self, change: Tensor | None, size: Tensor) -> None:
        """Takes the relative change of the adjoint in its last step, and the norm of the gradient that came in."""
        if change is not None:
            report(torch.stack([change.float(), size]), self._decide_convergence)

    def _decide_convergence(self, values: Tensor) -> None:
        change, size = values.tolist()
        if change <= UNSETTLED or not math.isfinite(size):  # a scaled loss may overflow
            return
        text = (
            f"the adjoint equation of gradient='implicit' is not solved: its solution changed by {change:.1e} of its "
            f"size in the last step, where {UNSETTLED:g} can be tolerated ({self.setting}), so that its "
            "gradient is not the fixed point's. Take more steps, find better coefficients with revdeq.tune, or use "
            "gradient='exact'"
        )
        self._tell("adjoint", text, ConvergenceError, ConvergenceWarning)

    def _tell(self, kind: str, text: str, error: type[Exception], warning: type[Warning]) -> None:
        if self.check == "raise":
            raise error(text)
        self._warn(kind, text, warning)

    def _warn(self, kind: str, text: str, warning: type[Warning]) -> None:
        """Once for each kind of trouble at each line that calls."""
        key = (*self.site, kind)
        if key not in _already_warned:
            warnings.warn_explicit(text, warning, *self.site)  # where warnings are errors, each of them is one
            _already_warned.add(key)


SAMPLE = 1024
SMALLEST_SCALE = 1e-30
"""Below all that a float32 state means, and above 0: an error of 0 relative to it is 0."""


def typical_magnitude(x: Tensor) -> Tensor:
    """The median magnitude of what is not 0 in a sample of a tensor: a 0-d float32 tensor on its device, which is not
    waited for. The sample steps through memory by a number that has no divisor in common with the number of
    elements, so that it meets every feature."""
    n = x.numel()
    if n == 0:
        return torch.full((), SMALLEST_SCALE, device=x.device)
    if not torch.ops.aten.is_non_overlapping_and_dense(x):
        x = x.contiguous()
    stride = _stride(n)
    sample = x.as_strided((-(-n // stride),), (stride,)).float().abs().sort(descending=True).values
    return sample.take(sample[1:].count_nonzero() // 2).clamp(min=SMALLEST_SCALE)


@functools.lru_cache
def _stride(n: int) -> int:
    return next(s for s in itertools.count(-(-n // SAMPLE)) if math.gcd(s, n) == 1)


def apart(x: Tensor, expected: Tensor, floor: Tensor) -> Tensor:
    """As `invert_compare` has it: the largest distance, relative to each element's own size, as the bits of a float."""
    if x.numel() == 0:
        return torch.empty(0, dtype=torch.int32, device=x.device)
    x, expected = x.float(), expected.float()
    return ((x - expected).abs() / torch.maximum(expected.abs(), floor)).amax().view(torch.int32)


_already_warned: set[tuple[str, int, str]] = set()


def call_site() -> tuple[str, int]:
    """File and line of the call that led into this package, past torch's own frames."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("revdeq", "torch"):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
