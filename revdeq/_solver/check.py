"""Detects when the backward pass failed to reconstruct the forward pass, and when the solve was not sound.

The backward pass compares the reconstructed initial state with the original. The error of each element is relative to
its magnitude after the first step, or to the typical magnitude of its tensor if that is larger; the maximum is rho. In
974 runs of MLPs, conv and transformer blocks, gradients were off by at most 6e-7 with rho up to 1e-5, and by 3e-5 up to
1e-4. Not detected are errors in elements much smaller than is typical of their tensor, and errors that f contracts away
in the backward pass: `revdeq.verify` compares every evaluation.

On the CPU a verdict is immediate. On other devices, whose values are still being computed, it comes when the first
solve begins after the value has arrived, or at exit, so that no solve waits.
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
"""The largest growth of the adjoint without a warning. Models that learned well had up to 250 at the start of training;
a recursive model that learned nothing had 2,000."""

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
        self._sizes: list[Tensor] = []

    @property
    def growth(self) -> Tensor | None:
        """The norm of the gradient with respect to the states after the first step, over that with respect to the last
        states, a 0-d tensor. If it is large, f expands, and gradients explode. None if `check` is None."""
        return self._sizes[1] / self._sizes[0] if len(self._sizes) == 2 else None

    def begin(self, grads: Sequence[Tensor | None]) -> None:
        """Note the gradient with respect to the last states."""
        self._sizes = [_norm([g for g in grads if g is not None])]

    def end(self, adjoints: Sequence[Sequence[Tensor]], b: float) -> None:
        """Note that with respect to the states of the first step."""
        if self._sizes:
            self._sizes = [self._sizes[0], _norm([*adjoints[0], *adjoints[1]]) / abs(b)]

    def sizes(self) -> list[Tensor]:
        return self._sizes if len(self._sizes) == 2 else []


@dataclass(frozen=True)
class Check:
    """Warns or raises.

    site: file and line of the call of `solve`."""

    mode: str
    site: tuple[str, int]
    setting: str
    state: str

    def judge(self, maxima: Sequence[Tensor], norms: Tensor, statistics: Statistics) -> None:
        """Check a reconstruction: the partial maxima of `invert_compare`, and the squared norms of the last change of z
        and of z, which are read only if it failed; and the growth of the adjoint."""
        if any(m.numel() for m in maxima):
            rho = torch.cat([m.flatten() for m in maxima]).amax().view(torch.float32)
            values = [rho, *(x.float() for x in statistics.sizes())]
            report(torch.stack(values), functools.partial(self._decide, norms))

    def _decide(self, norms: Tensor, values: Tensor) -> None:
        rho, *sizes = values.tolist()
        if not rho <= LIMIT:
            self._tell(
                f"the backward pass failed to reconstruct z0: the relative error is {rho:.1e}, above the limit of "
                f"{LIMIT:.0e} ({self.setting}), so the gradient of this solve is not exact. {self._cause(norms)}",
                ReconstructionError,
                ReconstructionWarning,
            )
        elif sizes and math.isfinite(sizes[0]) and not sizes[1] <= LARGEST_GROWTH * sizes[0]:
            # An infinite gradient of a scaled loss is up to its GradScaler.
            self._tell(
                f"the gradient grew from {sizes[0]:.1e} at the last step to {sizes[1]:.1e} at the first "
                f"({self.setting}): it is exact, but f expands, so that the gradient explodes with more steps and is "
                "dominated by the first ones. Damp f with gamma < 1 (0.25 to 0.5), or take fewer steps",
                None,
                ConvergenceWarning,
            )

    def _cause(self, norms: Tensor) -> str:
        other = "f does not return the same result when it is called again (its own generator? a counter?)"
        if self.state == "exact":
            return f"The exact state loses nothing: {other}. {ATOMICS}"
        change, value = norms.double().reshape(2, -1).sum(1).tolist()
        if change > value / 4:
            return (
                f"The iteration does not converge, or {other}: z has size {math.sqrt(value):.1e}, and the last step "
                f"changed it by {math.sqrt(change):.1e}, which a float64 state may not invert. Find better coefficients "
                'with revdeq.tune, normalize f\'s output, or use state="exact"'
            )
        return (
            f'Either {other}, or the float64 state was rounded beyond recovery: use state="exact", fewer steps or '
            f"a beta further from 1. revdeq.verify finds out which. {ATOMICS}"
        )

    def judge_adjoint(self, change: Tensor, size: Tensor) -> None:
        """Check gradient="implicit": the last change of the adjoint, unless the incoming gradient is infinite."""
        report(torch.stack([change.float(), size.float()]), self._decide_adjoint)

    def _decide_adjoint(self, values: Tensor) -> None:
        change, size = values.tolist()
        if math.isfinite(size) and not change <= UNSETTLED:
            self._tell(
                f"the adjoint equation of gradient='implicit' is not solved: the relative change of the last step is "
                f"{change:.1e}, above the limit of {UNSETTLED:g} ({self.setting}), so the gradient is not the fixed "
                "point's. Take more steps, find better coefficients with revdeq.tune, or use gradient='exact'",
                ConvergenceError,
                ConvergenceWarning,
            )

    def judge_same(self, now: Sequence[Tensor], then: Sequence[Tensor]) -> None:
        """Check gradient="implicit": the last output of f, evaluated in the backward pass and in the forward pass."""
        worst = [(x - y).abs().amax().float() / y.abs().amax() for x, y in zip(now, then, strict=True) if x.numel()]
        if worst:
            report(torch.stack(worst).amax(), self._decide_same)

    def _decide_same(self, distance: Tensor) -> None:
        if not distance.item() <= LIMIT:
            self._tell(
                f"f does not return the same when it is called again: its last output differs by {distance.item():.1e} "
                f"({self.setting}), so the gradient is that of a different f. Do not change what f reads before the "
                "backward pass",
                ReconstructionError,
                ReconstructionWarning,
            )

    def judge_gap(self, gap: float, tol: float) -> None:
        """Check the relative distance of y and z when tol is met."""
        if gap > math.sqrt(tol):
            self._tell(
                f"y and z converge to two different points, at a relative distance of {gap:.1e} ({self.setting}): z is "
                "not a fixed point. Try gamma < 1, or revdeq.tune",
                ConvergenceError,
                ConvergenceWarning,
            )

    def _tell(self, text: str, error: type[Exception] | None, warning: type[Warning]) -> None:
        """Raise, or warn once per calling line."""
        if self.mode == "raise" and error is not None:
            raise error(text)
        if (*self.site, warning) not in _already_warned:
            warnings.warn_explicit(text, warning, *self.site)  # raises every time if warnings are errors
            _already_warned.add((*self.site, warning))


_already_warned: set[tuple[str, int, type]] = set()


def typical_magnitude(x: Tensor) -> Tensor:
    """The fourth power of the mean fourth root of some of its magnitudes, which a few large ones hardly move: float32,
    0-d, on the device of x, above 0."""
    if x.numel() == 0:
        return torch.full((), 1e-30, device=x.device)
    some = x.detach().flatten() if x.is_contiguous() else x.detach().reshape(-1)
    some = some[:: 1 + some.numel() // SAMPLE].float()
    return torch.linalg.vector_norm(some, 0.25).mul_(float(some.numel()) ** -4).clamp_(min=1e-30)


SAMPLE = 1024


def _norm(xs: Sequence[Tensor]) -> Tensor:
    norms = [torch.linalg.vector_norm(x if x.layout is torch.strided else x.to_dense()) for x in xs]
    return torch.linalg.vector_norm(torch.stack(norms))


def call_site() -> tuple[str, int]:
    """File and line of the call into this package, skipping torch's frames."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("revdeq", "torch"):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


_pending: list[tuple[Callable[[Tensor], None], _device.Arriving, torch.device]] = []


def report(value: Tensor, decide: Callable[[Tensor], None]) -> None:
    """Check a value now if it is available, otherwise later. During graph capture there is no value to check."""
    if value.device.type == "cpu":
        decide(value)
    elif not _device.is_capturing(value.device):
        _pending.append((decide, _device.Arriving(value), value.device))


def settle() -> None:
    """Run the pending checks whose values have arrived."""
    for decision in list(_pending):
        decide, arriving, device = decision
        if not _device.is_capturing(device) and arriving.has_come():
            _pending.remove(decision)
            decide(arriving.value)


@atexit.register
def _settle_all() -> None:
    """At exit, errors are printed, because they can no longer be raised."""
    while _pending:
        decide, arriving, device = _pending.pop(0)
        _device.synchronize(device)
        try:
            decide(arriving.value)
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
