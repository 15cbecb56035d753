"""A schedule: a pair (beta, gamma) for every half-step, found by gradient descent through the solve.

K evaluations of f are a polynomial of degree K in its Jacobian, with 2 K coefficients. A constant pair is optimal only
for K to infinity; for the K of a real solve there are better schedules.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from .. import _device
from ..kernels.half_step import Coefficients
from .solve import solve
from .unrolled import inner, unrolled

CLOSEST_TO_1 = 1 / 16
"""A smaller |1 - beta| gains nothing, and costs the reconstruction four bits or more per half-step."""

UPDATES, RATE = 150, 0.04
"""The number of updates, and the initial learning rate, which decays along a cosine."""

SETTLED = 0.6
"""After this share of the updates, the descent restarts from the best schedule so far, and no beta may cross 1 any
more: it might otherwise oscillate around the gap."""

HISTORIES, REGULARISATIONS = (3, 5, 8), (1e-4, 1e-8)
"""Settings of Anderson acceleration, for comparison."""

Pairs = tuple[tuple[float, float], ...]


def inside(learnt: Tensor) -> Tensor:
    """Clip the coefficients: beta to [.05, 1.95] and at least 1/16 away from 1, gamma to [.05, 3]. Gradients pass
    straight through, so that beta can cross the gap around 1."""
    with torch.no_grad():
        beta, gamma = learnt.clamp(0.05, 3).unbind(1)
        below = torch.where(beta < 1, beta.clamp(max=1 - CLOSEST_TO_1), beta.clamp(1 + CLOSEST_TO_1, 1.95))
        moved = torch.stack([below, gamma], 1) - learnt
    return learnt + moved


@dataclass(frozen=True)
class Problem:
    """f, and the batches (z0, *args) to tune it for. All solves see the same random numbers."""

    f: Callable[..., Any]
    batches: Sequence[tuple[Any, ...]]
    kwargs: Mapping[str, Any]
    indexed: bool
    aux: bool
    device: torch.device
    random: Sequence[Tensor]

    def rewind(self) -> None:
        _device.set_generator_states(self.device, self.random)

    def called(self, z: Any, args: Sequence[Any], evaluation: int) -> Any:
        """f as the solver calls it, on a copy of z, which f may modify in place."""
        self.rewind()
        index = {"evaluation": evaluation} if self.indexed else {}
        out = self.f(tree_map(torch.clone, z), *args, **self.kwargs, **index)
        return out[0] if self.aux else out

    def solved(self, batch: int, **settings: Any) -> tuple[Tensor, int]:
        """The logarithm of the relative residual after a solve, differentiable, and the number of evaluations."""
        z0, *args = self.batches[batch]
        self.rewind()
        if isinstance(schedule := settings.get("schedule"), Tensor):  # differentiable, in the memory of a stored graph

            def called(z: Any, *args: Any, evaluation: int) -> Any:
                return self.called(z, args, evaluation)

            pairs = [Coefficients(1 - beta, beta * gamma, beta * (1 - gamma)) for beta, gamma in schedule]
            z = unrolled(called, z0, tuple(args), pairs, indexed=True)[1]
            return log_residual(self.called(z, args, len(pairs) - 1), z), len(pairs)
        known: dict[str, Any] = {"kwargs": self.kwargs, "indexed": self.indexed, "aux": self.aux, "check": None}
        solution = solve(self.f, z0, *args, **known, **settings)
        return log_residual(self.called(solution.z, args, solution.nfe - 1), solution.z), solution.nfe

    def residual(self, **settings: Any) -> tuple[float, int]:
        """The geometric mean over the batches, infinite if a solve diverges, and the largest number of evaluations."""
        logarithms, counts = [], [0]
        with torch.no_grad():
            for batch in range(len(self.batches)):
                try:
                    size, evaluations = self.solved(batch, state="float64", **settings)
                except (FloatingPointError, OverflowError):
                    return math.inf, 2 * settings["max_steps"]
                logarithms.append(size.item())
                counts.append(evaluations)
        mean = sum(logarithms) / len(logarithms)
        return (math.exp(mean) if mean < 700 else math.inf), max(counts)

    def along(self, **settings: Any) -> list[float]:
        """The residual of the first batch after 1, 2, 3, ... evaluations."""
        sizes = []

        def noted(z: Any, *args: Any, **keywords: Any) -> Any:
            given = tree_map(torch.clone, z)
            out = self.f(z, *args, **keywords)
            sizes.append(log_residual(out[0] if self.aux else out, given).exp().item())
            return out

        first = replace(self, f=noted, batches=self.batches[:1])
        first.residual(**settings)
        return sizes[1:]


def log_residual(out: Any, z: Any) -> Tensor:
    """log(‖f(z) - z‖ / ‖z‖); infinity in place of NaN."""
    states = tree_leaves(z)
    changes = [new.double() - old for new, old in zip(tree_leaves(out), states, strict=True)]
    change, value = (inner(x, x).clamp(min=sys.float_info.min).log() for x in (changes, states))
    return (change - value).nan_to_num(math.inf, math.inf) / 2


def descend(problem: Problem, start: Pairs, done: Callable[[], None]) -> Pairs:
    """Minimize the residual after the last half-step by gradient descent from a given schedule, cycling through the
    batches. Returns the best schedule found."""
    learnt = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([learnt], lr=RATE, betas=(0.9, 0.99))
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, UPDATES)
    settings: dict[str, Any] = {"max_steps": len(start) // 2, "state": "auto"}
    losses: list[float] = []
    best, found = math.inf, start
    with torch.inference_mode(False), torch.enable_grad():
        while len(losses) < UPDATES:
            used = inside(learnt)
            try:
                loss, _ = problem.solved(len(losses) % len(problem.batches), schedule=used, **settings)
            except OverflowError:  # the exact state overflows; the float64 state does not
                if settings["state"] == "float64":
                    break
                settings["state"] = "float64"
                continue
            except FloatingPointError:
                break
            (slope,) = torch.autograd.grad(loss, learnt)
            if not (loss.isfinite() and slope.isfinite().all()):
                break
            losses.append(loss.item())
            recent = losses[-len(problem.batches) :]
            if len(recent) == len(problem.batches) and sum(recent) < best:
                best, found = sum(recent), tuple((beta, gamma) for beta, gamma in used.tolist())
            learnt.grad = slope / slope.norm().clamp(min=1)
            optimizer.step()
            rate.step()
            with torch.no_grad():
                learnt.clamp_(0.05, 3)
                learnt[:, 0].clamp_(max=1.95)
                if len(losses) == round(SETTLED * UPDATES):
                    learnt.copy_(torch.tensor(found))
                if len(losses) >= SETTLED * UPDATES:
                    learnt.copy_(inside(learnt))
            done()
    return found


def anderson(problem: Problem, count: int) -> list[float]:
    """The residual of the first batch after 1, ..., `count` evaluations with Anderson acceleration, with the setting
    that is best after the last of them."""
    with torch.no_grad():
        tried = [_anderson(problem, count, m, lam) for m in HISTORIES for lam in REGULARISATIONS]
    return min(tried, key=lambda sizes: sizes[-1])


def _anderson(problem: Problem, count: int, history: int, regularisation: float) -> list[float]:
    """Anderson acceleration with separate weights per example, by least squares over its last residuals."""
    z, *args = problem.batches[0]
    leaves, spec = tree_flatten(z)
    rows = leaves[0].shape[0] if len({x.shape[:1] for x in leaves}) == 1 and leaves[0].dim() > 1 else 1
    widths = [x.numel() // rows for x in leaves]
    states: list[Tensor] = []
    outputs: list[Tensor] = []
    sizes = []
    for k in range(count + 1):
        out = problem.called(z, args, min(k, count - 1))
        sizes.append(log_residual(out, z).exp().item())
        for kept, tree in ((states, z), (outputs, out)):
            kept.append(torch.cat([x.double().reshape(rows, -1) for x in spec.flatten_up_to(tree)], 1))
        f, x = torch.stack(outputs[-history:], 1), torch.stack(states[-history:], 1)
        gram = (f - x) @ (f - x).transpose(1, 2)
        gram += regularisation * torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)
        weights = torch.linalg.solve(gram, gram.new_ones(rows, gram.shape[1], 1))
        new = (f * (weights / weights.sum(1, keepdim=True))).sum(1).split(widths, 1)
        z = tree_unflatten([n.reshape(x.shape).to(x.dtype) for n, x in zip(new, leaves, strict=True)], spec)
    return sizes[1:]
