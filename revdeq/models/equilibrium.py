"""The fixed point of a block, by the reversible solver or, for comparison, by another one."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._solver.repeatable import Random
from .._solver.layer import Last, RevDEQ
from .._solver.check import Statistics
from .._solver.iteration import NORM_FLOOR
from .._solver.options import NAMES, Options
from .._solver.solve import solve
from ..baselines import checkpointed, stored_graph
from .blocks import checked_size
from .caches import Cache, Caches
from .model import Model

SOLVERS = ("reversible", "stored", "checkpointed", "torchdeq")
OF_ALL = ("beta", "max_steps", "tol", "check")
SAME = (*OF_ALL, "gamma", "schedule")
TAKEN = {"stored": SAME, "checkpointed": SAME, "torchdeq": OF_ALL}
"""Options that other solvers use, or may ignore."""


class Equilibrium(RevDEQ):
    """A `revdeq.RevDEQ` with a choice of solvers, for comparison.

    Args:
        f: A module f(z, x).
        solver: "reversible" is the paper's. "stored" and "checkpointed" compute the same bits as "reversible" with
            state="float64", and are differentiated by plain autograd and by torch.utils.checkpoint. "torchdeq" is the
            classical equilibrium model: Anderson acceleration in both passes, down to the relative residual `tol` if it
            is given, and the implicit gradient. All of them draw one dropout mask per solve.
        evaluations: For "torchdeq", the maximum number of evaluations of f in the forward pass, and of vector-Jacobian
            products in the backward pass. None is 2 `max_steps`. The gradient takes one more evaluation of f.
        options: The options of `revdeq.RevDEQ`, by name.

    Raises:
        ValueError: An option does not apply to this solver.
        ImportError: solver is "torchdeq", which is not installed.

    Example:
        >>> revdeq.models.Equilibrium(Block(8), solver="stored", max_steps=4)(x).shape
        torch.Size([4, 8])
    """

    def __init__(
        self, f: Callable[..., Any], *, solver: str = "reversible", evaluations: int | None = None, **options: Any
    ) -> None:
        super().__init__(f, **options)
        self.solver = _checked_solver(solver, options)
        self.evaluations = _checked_evaluations(evaluations, self.max_steps, solver)
        if solver == "torchdeq":
            _anderson(3, None)  # raises now, not in the first forward pass, if torchdeq is missing

    def forward(self, x: Tensor, z0: Tensor | None = None) -> Tensor:  # type: ignore[override]
        if torch.is_autocast_enabled(x.device.type):
            x = x.float()  # autocast applies inside f, not to its input
        if self.solver == "reversible":
            return super().forward(x, z0=z0)
        f = _Repeated(self.f, x)
        if z0 is None:
            z0 = torch.zeros_like(x, requires_grad=False)
        if self.solver != "torchdeq":
            stored = stored_graph if self.solver == "stored" else checkpointed
            options = self.options
            z = stored(f, z0, **{name: options[name] for name in ("beta", "gamma", "max_steps", "schedule")})
            change, value = (z.detach() - f.inputs[-2]).norm(), z.detach().norm()
            residual = change / (value + NORM_FLOOR)
        else:
            deq = _anderson(self.evaluations or 2 * self.max_steps, self.tol)
            deq.train(torch.is_grad_enabled())  # torchdeq computes gradients in training mode only
            with torch.autocast(x.device.type, enabled=False):  # a Gram matrix in bfloat16 would be singular
                (z,), info = deq(f, z0)
            residual = info["rel_lowest"].mean()
        self.last = Last(f.calls // 2, f.calls, Statistics(), known=residual)
        f.inputs.clear()
        return z

    def by_position(self, x: Tensor, tol: float) -> Tensor:
        """The equilibrium of sequences, where each position stops separately.

        Positions are the examples of `per_example=True`: f still reads those that have stopped, in the states in which
        they rest. If f is causal, a position depends neither on later ones nor on when these stop.

        Args:
            x: The input, of shape (B, T, ...).
            tol: The tolerance of every position, as for `revdeq.solve`.

        Returns:
            z, shaped like x. `last.steps` has the number of steps of every position, of shape (B, T).

        Raises:
            ValueError: The solver is not "reversible".

        Example:
            >>> deq = revdeq.models.Equilibrium(revdeq.models.TransformerBlock(8, heads=2, form="residual"))
            >>> deq.by_position(torch.randn(2, 5, 8), tol=0.1).shape, deq.last.steps.shape
            (torch.Size([2, 5, 8]), torch.Size([2, 5]))
        """
        if self.solver != "reversible":
            raise ValueError(f"tol = {tol!r} of every position: solver = {self.solver!r} has none; use 'reversible'")
        if torch.is_autocast_enabled(x.device.type):
            x = x.float()

        def f(z: Tensor, evaluation: int) -> Tensor:
            return self._evaluated(z.view_as(x), x, evaluation).flatten(0, 1)

        options = {**self._used(None), "tol": tol, "per_example": True, "indexed": True, "aux": False}
        found = solve(f, torch.zeros_like(x, requires_grad=False).flatten(0, 1), **options)
        self.last = Last(found.steps.view(x.shape[:2]), found.nfe, found.adjoint, found.norms.view(2, *x.shape[:2]))
        return found.z.view_as(x)

    def _cached(self, x: Tensor, caches: Caches, tol: float | None = None) -> Tensor:
        """The equilibrium, or `by_position` with a tolerance, of positions that continue the cached ones, without a
        gradient."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.float()
        options = {**self._used(None), "indexed": True, "aux": False, "check": None}
        if tol is None:

            def f(z: Tensor, evaluation: int) -> Tensor:
                return self._evaluated(z, x, evaluation, cache=caches.at(evaluation))

            return solve(f, torch.zeros_like(x), **options).z

        def by_position(z: Tensor, evaluation: int) -> Tensor:
            cache = caches.at(evaluation)
            given = caches.with_late(evaluation, z.view_as(x), x)
            return self._evaluated(*given, evaluation, cache=cache)[:, -x.shape[1] :].flatten(0, 1)

        options |= {"tol": tol, "per_example": True}
        found = solve(by_position, torch.zeros_like(x).flatten(0, 1), **options)
        y, z = found.y.view_as(x), found.z.view_as(x)
        caches.rest(x, z, y)
        return z

    def _evaluated(self, z: Tensor, x: Tensor, k: int, **cache: Cache) -> Tensor:
        """f, without its auxiliary output."""
        out = self.f(z, x, **cache, **({"evaluation": k} if self.indexed else {}))
        return out[0] if self.aux else out

    def extra_repr(self) -> str:
        extra = f", evaluations={self.evaluations or 2 * self.max_steps}" if self.solver == "torchdeq" else ""
        return f"{super().extra_repr()}, solver={self.solver!r}{extra}"


OPTIONS = {*NAMES, "learn_coefficients", "solver", "evaluations"} - {"schedule"}
"""The options that a model passes on to its equilibria. `schedule` is not one: it is part of the weights, and in a
preset the word means the schedule of the learning rate."""


class _Repeated:
    """f(., x) with the same random numbers in all evaluations, as in `revdeq.solve`, and under the autocast settings of
    the forward pass. It counts its calls, and keeps the last two inputs."""

    def __init__(self, f: Callable[..., Any], x: Tensor) -> None:
        self.f, self.x, self.calls = f, x, 0
        self.inputs: list[Tensor] = []
        kind = x.device.type
        self._random = Random(x.device)
        self._autocast: Callable[[], Any] = contextlib.nullcontext
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            self._autocast = lambda: torch.autocast(kind, dtype=dtype)

    def __call__(self, z: Tensor) -> Tensor:
        self.calls += 1
        self.inputs = [*self.inputs[-1:], z.detach()]
        with self._autocast():
            return self._random(self.f, z, self.x).to(z.dtype)


def _anderson(evaluations: int, tol: float | None) -> nn.Module:
    try:
        import torchdeq
    except ImportError as error:
        raise ImportError(
            "solver = 'torchdeq' needs torchdeq: pip install torchdeq, or use solver='reversible'"
        ) from error
    return torchdeq.get_deq(
        f_solver="anderson",
        b_solver="anderson",
        ift=True,
        f_max_iter=evaluations,
        b_max_iter=evaluations,
        f_tol=tol or 0.0,
        b_tol=tol or 0.0,
        f_stop_mode="rel",
        b_stop_mode="rel",
    )


def _checked_solver(solver: str, options: Mapping[str, Any]) -> str:
    if solver not in SOLVERS:
        raise ValueError(f"solver = {solver!r} must be one of {', '.join(map(repr, SOLVERS))}")
    if solver in ("stored", "checkpointed") and options.get("tol") is not None:
        raise ValueError(f"tol = {options['tol']!r}: solver = {solver!r} always takes all steps; use tol=None")
    if solver != "reversible":
        for name, value in options.items():
            same = value == getattr(Options, name, False) or (name, value) == ("state", "float64")
            if name not in TAKEN[solver] and not same:
                raise ValueError(f"{name} = {value!r} belongs to solver = 'reversible'; with {solver!r} leave it out")
    return solver


def _checked_evaluations(evaluations: int | None, max_steps: int, solver: str) -> int | None:
    most = 2 * max_steps if evaluations is None else checked_size("evaluations", evaluations)
    if most < 3 and solver == "torchdeq":
        raise ValueError(f"evaluations = {most} must be at least 3: the first two start Anderson acceleration")
    return evaluations


class EquilibriumModel(Model):
    """Base class of the models with equilibria."""

    @property
    def equilibria(self) -> list[Equilibrium]:
        return [m for m in self.modules() if isinstance(m, Equilibrium)]

    @property
    def last(self) -> Last | None:
        """Statistics of the last forward pass: steps and nfe, summed over all equilibria, and the largest change of
        those that took more than one step (the first step from zero always has a change of 1)."""
        return last_of(self)


def last_of(model: nn.Module) -> Last | None:
    lasts = [m.last for m in model.modules() if isinstance(m, RevDEQ) and m.last is not None]
    if not lasts:
        return None
    changes = [x.change.amax() for x in lasts if x.nfe > 2] or [x.change.amax() for x in lasts]
    return Last(sum(x.steps for x in lasts), sum(x.nfe for x in lasts), Statistics(), known=torch.stack(changes).amax())
