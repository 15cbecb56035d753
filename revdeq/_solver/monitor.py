"""Detects when the backward pass failed to reconstruct the forward pass.

The backward pass compares the reconstructed initial state with the original. The error of each element is relative to
its magnitude after the first step, or to the typical magnitude of its tensor if that is larger; the maximum is rho. In
974 runs of MLPs, conv and transformer blocks, the reconstruction error relative to the largest state bounded the
gradient error: up to 1e-5, gradients were off by at most 6e-7, and up to 1e-4, by 3e-5; errors above 1e-2 did not
occur. rho is never smaller than that error.

Every element of every tensor of the state is compared on its own scale, so that neither a large feature nor a large
tensor hides an error elsewhere. Not detected are errors in elements much smaller than is typical of their tensor, and
errors that f contracts away in the backward pass: `revdeq.verify` compares every evaluation.
"""

import functools
import itertools
import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .deferred import report
from .state import is_dense

CHECKS = ("warn", "raise", None)

LIMIT = 1e-4
"""The largest accepted rho: above it, the gradient may be off by more than 3e-5."""

MOVING = 0.5
"""A relative change of the last step above which an iteration does not converge."""

COARSE = 1e-3
"""The largest rounding error, relative to a typical number, without a warning. If a signal decays, as along a graph,
half of a state may be much smaller than that without harm."""

ATOMICS = (
    "On a GPU, index_add, scatter and similar operations sum in any order: torch.use_deterministic_algorithms(True) "
    "replaces them, or names those that it cannot"
)

UNSETTLED = 0.1
"""The largest accepted relative change of an adjoint in its last step: stochastic gradients vary by more than a
tenth."""


LARGEST_GROWTH = 1000.0
"""The largest growth of the adjoint, from the last step to the first, without a warning. If f contracts, the adjoint
shrinks; with a non-normal Jacobian it may grow first. Models that learned well had up to 250 at the start of training
(convolutions for images, mazes); a recursive model that learned nothing had 2,000."""


class ReconstructionWarning(UserWarning):
    """The backward pass could not reconstruct the forward pass, so its gradient cannot be trusted.

    The message has the size of the error and the remedies. It is shown once per line that calls `solve`.
    """


class ReconstructionError(RuntimeError):
    """The same as `ReconstructionWarning`, raised with check="raise"."""


class ConvergenceWarning(UserWarning):
    """The iteration does not converge: y and z converge to different points, the gradient explodes, or the backward
    pass of gradient="implicit" did not solve the adjoint equation. The message says which, and what to do."""


class ConvergenceError(RuntimeError):
    """The same as `ConvergenceWarning`, raised with check="raise"."""


@dataclass
class Adjoint:
    """Statistics of the backward pass of a solve, once it has run.

    Attributes:
        growth: The growth of the adjoint from the last step to the first, a 0-d tensor: the norm of the gradient with
            respect to the states of the first step, over that with respect to the last states. If it is large, f
            expands, and gradients explode. None if `check` is None.
        steps: With gradient="implicit", the number of steps, each with two products.
        change: With gradient="implicit", the relative change of the adjoint in the last step, a 0-d tensor.
        norms: The two norms of `growth`: of the gradients with respect to the last states, and to those of the first
            step.
    """

    steps: int | None = None
    change: Tensor | None = None
    sizes: "Sizes | None" = field(default=None, repr=False)

    @property
    def norms(self) -> Tensor | None:
        return None if self.sizes is None else self.sizes.norms()

    @property
    def growth(self) -> Tensor | None:
        return None if (norms := self.norms) is None else norms[1] / norms[0]


class Sizes(NamedTuple):
    """Norms of the adjoints of y and z, for each tensor of the state: of the incoming gradients, and after the first
    step. Each is multiplied by a factor. They are combined on the host, or when they are read: a solve launches no
    kernels for it."""

    last: list[Tensor]
    by: tuple[float, float]
    first: list[Tensor]
    b: tuple[float, float]

    def norms(self) -> Tensor:
        pairs = (self.last, self.by), (self.first, self.b)
        return torch.stack(
            [functools.reduce(torch.hypot, _divided(torch.cat(x).unbind(), factors)) for x, factors in pairs]
        )


def _divided(values: Sequence[Any], factors: tuple[float, float]) -> list[Any]:
    """Divide norms, alternately of y and z, by their factors."""
    return [x / factors[i % 2] for i, x in enumerate(values)]


@dataclass(frozen=True)
class Monitor:
    """Checks the results of a solve, and warns or raises.

    On the CPU this happens at the end of the backward pass. On other devices it is deferred.
    """

    check: str
    site: tuple[str, int]
    setting: str
    state: str
    resolution: float

    def judge(
        self, maxima: Sequence[Tensor], norms: Tensor, magnitudes: Sequence[Tensor], adjoint: Sizes | None
    ) -> None:
        """Check a reconstruction: the partial maxima of `invert_compare`, the squared norms of the last change of z and
        of z, the typical magnitudes of each tensor of the state, of which the largest counts, and the norms of the
        adjoint."""
        filled = [m.flatten() for m in maxima if m.numel()]
        if not filled:
            return
        rho = (filled[0] if len(filled) == 1 else torch.cat(filled)).amax().view(torch.float32)
        of_adjoint = [] if adjoint is None else [*adjoint.last, *adjoint.first]
        factors = None if adjoint is None else (adjoint.by, adjoint.b)
        decide = functools.partial(self._decide, tensors=len(magnitudes), factors=factors)
        report(torch.cat([rho.view(1), norms, *of_adjoint, *magnitudes]), decide)

    def _decide(
        self, values: Tensor, tensors: int, factors: tuple[tuple[float, float], tuple[float, float]] | None
    ) -> None:
        rho, change, value, *rest = values.tolist()
        before = after = 1.0
        if factors is not None:
            count = 2 * tensors
            before, after = (math.hypot(*_divided(rest[i * count :][:count], factors[i])) for i in (0, 1))
            rest = rest[2 * count :]
        each = len(rest) // tensors
        sizes = [max(rest[i : i + each]) for i in range(0, len(rest), each)]
        change, value = math.sqrt(change), math.sqrt(value)
        coarse = [size for size in sizes if 2 * SMALLEST_SCALE < size < self.resolution / COARSE]
        if coarse:
            text = (
                f"the resolution of the exact state, {self.resolution:.0e}, is coarse for numbers of a typical size of "
                f"{min(coarse):.1e}: the solution and its gradient may be off by {self.resolution / min(coarse):.0e} "
                f"({self.setting}). Scale z, in f, to a size of about 1, or use state=revdeq.Exact(fraction_bits=30) "
                'or state="float64"'
            )
            self._tell("coarse", text, ReconstructionError, ReconstructionWarning)
        if rho <= LIMIT:
            if math.isfinite(before):  # a scaled loss may overflow; that is up to its GradScaler
                self._decide_growth(before, after)
            return
        cause = (
            "f does not return the same result when it is called again (numbers of NumPy or of a torch.Generator? a "
            "counter? use indexed=True)"
        )
        if self.state == "float64":
            cause = (
                f'Either {cause}, or the float64 state was rounded beyond recovery: use state="exact", fewer steps or '
                "a beta further from 1. revdeq.verify finds out which"
            )
        else:
            cause = f"The exact state loses nothing: {cause}"
        cause = f"{cause}. {ATOMICS}"
        if self.state == "float64" and not change <= MOVING * value:
            cause = (
                f"The iteration does not converge: z has size {value:.1e}, and the last step changed it by "
                f"{change:.1e}, which a float64 state cannot invert. Find better coefficients with revdeq.tune, or "
                "normalize f's output"
            )
        text = (
            f"the backward pass failed to reconstruct z0: the relative error is {rho:.1e}, above the limit of "
            f"{LIMIT:.0e} ({self.setting}), so the gradient of this solve is not exact. {cause}"
        )
        self._tell("lost", text, ReconstructionError, ReconstructionWarning)

    def _decide_growth(self, before: float, after: float) -> None:
        if not math.isfinite(after):
            text = (
                f"the gradient is not finite at the first step, and had size {before:.1e} at the last "
                f"({self.setting}): f expands, so that gradients explode. Take fewer steps, damp f with gamma < 1, or "
                "differentiate the last steps only (backward_steps)"
            )
            self._tell("not finite", text, ConvergenceError, ConvergenceWarning)
        elif after > LARGEST_GROWTH * before > 0:  # 0 if only auxiliary outputs have a gradient
            text = (
                f"the gradient grew {after / before:.1e} times from the last step to the first ({self.setting}): it is "
                "exact, but f expands, so that the gradient explodes with more steps and is dominated by the first "
                "ones. Damp f with gamma < 1 (0.25 to 0.5), take fewer steps, or differentiate the last ones only "
                "(backward_steps)"
            )
            self._warn("growth", text, ConvergenceWarning)

    def judge_gap(self, gap: Tensor, tol: float) -> None:
        """Check the relative distance of y and z after convergence."""
        distance = gap.item()
        if distance > math.sqrt(tol):
            text = (
                f"y and z converge to two different points, at a relative distance of {distance:.1e} ({self.setting}): "
                "z is not a fixed point. Try gamma < 1, or revdeq.tune"
            )
            self._tell("gap", text, ConvergenceError, ConvergenceWarning)

    def judge_same(self, now: Sequence[Tensor], before: Sequence[Tensor]) -> None:
        """Check gradient="implicit": compare the last output of f in the backward pass with that of the forward
        pass."""
        pairs = [(x, y) for x, y in zip(now, before, strict=True) if x.numel() > 0]
        if not pairs:
            return
        worst = [((x - y).float().abs().amax(), y.float().abs().amax()) for x, y in pairs]
        report(torch.stack([torch.stack(pair) for pair in worst]), self._decide_same)

    def _decide_same(self, values: Tensor) -> None:
        for distance, size in values.tolist():
            if not distance <= LIMIT * size:
                text = (
                    f"f does not return in the backward pass what it returned in the forward pass: its last output "
                    f"differs by {distance:.1e}, of numbers up to {size:.1e} ({self.setting}), so the gradient is "
                    "that of a different f. Do not change anything that f reads before the backward pass"
                )
                self._tell("changed", text, ReconstructionError, ReconstructionWarning)

    def judge_convergence(self, change: Tensor | None, size: Tensor) -> None:
        """Check the relative change of the adjoint in its last step, and the norm of the incoming gradient."""
        if change is not None:
            report(torch.stack([change.float(), size]), self._decide_convergence)

    def _decide_convergence(self, values: Tensor) -> None:
        change, size = values.tolist()
        if change <= UNSETTLED or not math.isfinite(size):  # a scaled loss may overflow
            return
        text = (
            f"the adjoint equation of gradient='implicit' is not solved: the relative change of the last step is "
            f"{change:.1e}, above the limit of {UNSETTLED:g} ({self.setting}), so the gradient is not the fixed "
            "point's. Take more steps, find better coefficients with revdeq.tune, or use gradient='exact'"
        )
        self._tell("adjoint", text, ConvergenceError, ConvergenceWarning)

    def _tell(self, kind: str, text: str, error: type[Exception], warning: type[Warning]) -> None:
        if self.check == "raise":
            raise error(text)
        self._warn(kind, text, warning)

    def _warn(self, kind: str, text: str, warning: type[Warning]) -> None:
        """Warn once per kind of problem and calling line."""
        key = (*self.site, kind)
        if key not in _already_warned:
            warnings.warn_explicit(text, warning, *self.site)  # raises every time if warnings are errors
            _already_warned.add(key)


SAMPLE = 1024
SMALLEST_SCALE = 1e-30
"""Below any meaningful float32 state, but not 0, to divide by."""


def typical_magnitudes(*xs: Tensor) -> Tensor:
    """The median magnitude of the nonzero elements in a sample of each tensor, all of one size: float32, on their
    device, without synchronizing. The stride of the sample is coprime to the number of elements, so that it covers
    every feature."""
    n = xs[0].numel()
    if n == 0:
        return torch.full((len(xs),), SMALLEST_SCALE, device=xs[0].device)
    samples = [_sample(x, n) for x in xs]
    rows = samples[0][None] if len(xs) == 1 else torch.stack(samples)
    rows = rows.abs().sort(1, descending=True).values
    middle = rows[:, 2::2].count_nonzero(1)  # the index of the median of those that are not 0
    return rows.gather(1, middle[:, None]).flatten().clamp(min=SMALLEST_SCALE)


def _sample(x: Tensor, n: int) -> Tensor:
    if not is_dense(x):
        x = x.contiguous()
    stride = _stride(n)
    return x.as_strided((-(-n // stride),), (stride,)).float()


@functools.lru_cache
def _stride(n: int) -> int:
    return next(s for s in itertools.count(-(-n // SAMPLE)) if math.gcd(s, n) == 1)


def apart(x: Tensor, expected: Tensor, floor: Tensor) -> Tensor:
    """Like `invert_compare`: the largest difference relative to each element's magnitude, as the bits of a float."""
    if x.numel() == 0:
        return torch.empty(0, dtype=torch.int32, device=x.device)
    x, expected = x.float(), expected.float()
    return ((x - expected).abs() / torch.maximum(expected.abs(), floor)).amax().view(torch.int32)


_already_warned: set[tuple[str, int, str]] = set()


def call_site() -> tuple[str, int]:
    """File and line of the call into this package, skipping torch's frames."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("revdeq", "torch"):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
