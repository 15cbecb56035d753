"""Detects when the backward pass failed to reconstruct the forward pass, and when the solve was not sound.

The backward pass compares the reconstructed initial state with the original. The error of each element is relative to
its magnitude after the first step, or to the typical magnitude of its tensor if that is larger; the maximum is rho. In
974 runs of MLPs, conv and transformer blocks, gradients were off by at most 6e-7 with rho up to 1e-5, and by 3e-5 up to
1e-4. Not detected are errors in elements much smaller than is typical of their tensor, and errors that f contracts away
in the backward pass: `revdeq.verify` compares every evaluation.

On the CPU a verdict is immediate. On a GPU it comes when the first solve begins after its numbers have arrived, or at
exit, so that no solve waits.
"""

import atexit
import functools
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _device

LIMIT = 1e-4
"""The largest accepted rho: above it, the gradient may be off by more than 3e-5."""

UNSETTLED = 0.1
"""The largest accepted relative change of an adjoint in its last step: stochastic gradients vary by more."""

LARGEST_GROWTH = 1000.0
"""The largest growth of the adjoint without a warning: models that learned well had up to 250, one that learned nothing
had 2,000."""

ATOMICS = (
    "On a GPU, index_add, scatter and similar operations sum in any order: torch.use_deterministic_algorithms(True) "
    "replaces them, or names those that it cannot"
)


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


class Statistics:
    """Statistics of the backward pass of a solve, once it has run.

    Attributes:
        steps: With gradient="implicit", the number of steps, each with two products.
        change: With gradient="implicit", the relative change of the adjoint in the last step, a 0-d tensor.
    """

    def __init__(self) -> None:
        self.steps: int | None = None
        self.change: Tensor | None = None
        self.last: list[Tensor] = []  # norms of the gradients with respect to the last states, and to those of the
        self.first: list[Tensor] = []  # first step, times b
        self.b = 1.0

    def __repr__(self) -> str:
        return f"Statistics(steps={self.steps}, change={self.change}, growth={self.growth})"

    @property
    def growth(self) -> Tensor | None:
        """The norm of the gradient with respect to the states after the first step, over that with respect to the last
        states, a 0-d tensor. If it is large, f expands, and gradients explode. None if `check` is None."""
        if not self.first or not self.last:
            return None
        return torch.stack(self.first).norm() / (self.b * torch.stack(self.last).norm())


@dataclass(frozen=True)
class Check:
    """Warns or raises. site: file and line of the call of `solve`."""

    options: Any
    site: tuple[str, int]
    precision: Any

    def judge(self, maxima: list[Tensor], norms: Tensor, statistics: Statistics) -> None:
        """Check a reconstruction: the partial maxima of `invert_compare`, and the squared norms of the last change of z
        and of z, which are read only if it failed; and the growth of the adjoint."""
        errors, last, first = torch.cat(maxima), statistics.last, statistics.first
        if errors.numel():
            rho = errors.amax().view(torch.float32)
            report([rho, *last, *first], functools.partial(self._decide, norms, len(last), statistics.b))

    def _decide(self, norms: Tensor, last: int, b: float, values: list[float]) -> None:
        rho, before, after = values[0], math.hypot(*values[1 : 1 + last]), math.hypot(*values[1 + last :]) / b
        if not rho <= LIMIT:
            text = (
                f"the backward pass failed to reconstruct z0: the relative error is {rho:.1e}, above the limit "
                f"of {LIMIT:.0e}, so the gradient of this solve is not exact. {self._cause(norms)}"
            )
            self._tell(text, ReconstructionError, ReconstructionWarning)
            return
        # An infinite gradient of a scaled loss is up to its GradScaler.
        if math.isfinite(before) and not after <= LARGEST_GROWTH * before and last:
            text = (
                f"the gradient grew from {before:.1e} at the last step to {after:.1e} at the first: it is exact, but f "
                "expands, so that the gradient explodes with more steps and is dominated by the first ones. Damp f "
                "with gamma < 1 (0.25 to 0.5), or take fewer steps"
            )
            self._tell(text, None)

    def _cause(self, norms: Tensor) -> str:
        other = "f does not return the same result when it is called again (its own generator? a counter?)"
        if self.precision.name == "exact":
            return f"The exact state loses nothing: {other}. {ATOMICS}"
        change, value = norms.double().reshape(2, -1).sum(1).tolist()
        if change > value / 4:
            return (
                f"The iteration does not converge, or {other}: z has size {math.sqrt(value):.1e}, and the last step "
                f"changed it by {math.sqrt(change):.1e}, which a float64 state may not invert. Find better "
                'coefficients with revdeq.tune, normalize f\'s output, or use state="exact"'
            )
        return (
            f'Either {other}, or the float64 state was rounded beyond recovery: use state="exact", fewer steps or '
            f"a beta further from 1. revdeq.verify finds out which. {ATOMICS}"
        )

    def judge_adjoint(self, change: Tensor, size: Tensor) -> None:
        """Check gradient="implicit": the last change of the adjoint, unless the incoming gradient is infinite."""

        def decide(values: list[float]) -> None:
            if math.isfinite(values[1]) and not values[0] <= UNSETTLED:
                self._tell(
                    f"the adjoint equation of gradient='implicit' is not solved: its last step changed the adjoint by "
                    f"{values[0]:.1e}, more than {UNSETTLED:g}, so the gradient is not the fixed point's. Take more "
                    "steps, find better coefficients with revdeq.tune, or use gradient='exact'"
                )

        report([change, size], decide)

    def judge_gap(self, gap: float) -> None:
        """Check the relative distance of y and z when tol is met."""
        if gap > math.sqrt(self.options.tol):
            self._tell(
                f"y and z converge to two different points, at a relative distance of {gap:.1e}: z is not a fixed "
                "point. Try gamma < 1, or revdeq.tune"
            )

    def _tell(self, text: str, error: Any = ConvergenceError, warning: type[Warning] = ConvergenceWarning) -> None:
        """Raise, or warn once per calling line."""
        most = "at most " if self.options.tol else ""
        text += f" (beta = {self.precision.step.beta:.6g}, N = {most}{self.options.max_steps} steps)"
        if self.options.check == "raise" and error is not None:
            raise error(text)
        if (*self.site, warning) not in _already_warned:
            warnings.warn_explicit(text, warning, *self.site)  # raises every time if warnings are errors
            _already_warned.add((*self.site, warning))


_already_warned: set[tuple[str, int, type]] = set()


def typical_magnitude(x: Tensor) -> Tensor:
    """The fourth power of the mean fourth root of the magnitudes in a sample of a dense tensor, which a few large ones
    hardly move: float32, 0-d, on the device of x, above 0."""
    count = min(x.numel(), SAMPLE)
    stride = 1 if count < SAMPLE else (x.numel() // SAMPLE - 1) | 1  # odd, to see all features
    sample = x.as_strided((count,), (stride,)).float()
    return torch.linalg.vector_norm(sample, 0.25).mul_(float(count or 1) ** -4).add_(1e-30)


SAMPLE = 64


def call_site() -> tuple[str, int]:
    """File and line of the call into this package, skipping torch's frames."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("revdeq", "torch"):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


_pending: list[tuple[Callable[[list[float]], None], _device.Arriving, torch.device]] = []


def report(values: Sequence[Tensor], decide: Callable[[list[float]], None]) -> None:
    """Check 0-d tensors now if they are available, otherwise later. During graph capture there is nothing to check."""
    device = values[0].device if values else None
    if device is None or device.type == "cpu":
        decide([x.item() for x in values])
    elif not _device.is_capturing(device):
        _pending.append((decide, _device.Arriving(torch.stack([x.float() for x in values])), device))


def settle() -> None:
    """Run the pending checks whose values have arrived."""
    for decision in list(_pending):
        decide, arriving, device = decision
        if not _device.is_capturing(device) and arriving.has_come():
            _pending.remove(decision)
            decide(arriving.value.tolist())


@atexit.register
def _settle_all() -> None:
    """At exit, errors are printed, because they can no longer be raised."""
    while _pending:
        decide, arriving, device = _pending.pop(0)
        _device.synchronize(device)
        try:
            decide(arriving.value.tolist())
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
