"""The reversible solver in programs written for torchdeq.

    import revdeq.torchdeq
    deq = torchdeq.get_deq(core="reversible", f_max_iter=8, beta=0.5)
    z_out, info = deq(f, z0)          # z_out[-1] is the fixed point, info a SolverStat, as with any core

`f_max_iter` counts evaluations of f, two to a step. `f_tol` is the tolerance on the relative change of a
step; without it, or with None, exactly `f_max_iter` evaluations are made.
"""

import difflib
import warnings
from typing import Any

import torch
import torchdeq
from torch import Tensor
from torchdeq.core import DEQBase
from torchdeq.solver.stat import SolverStat
from torchdeq.utils.config import DEQConfig

from ._solver.solve import checked_beta, checked_tol, solve

KNOWN = ("core", "beta", "f_max_iter", "f_tol", "eval_factor", "eval_f_max_iter", "no_stat")

MEANINGLESS = {
    "f_solver": "fixed_point_iter",
    "f_stop_mode": "abs",
    "b_solver": "fixed_point_iter",
    "b_max_iter": 40,
    "b_tol": 1e-6,
    "b_stop_mode": "abs",
    "ift": False,
    "hook_ift": False,
    "grad": [1],
    "tau": 1.0,
    "sup_gap": -1,
    "sup_loc": [],
    "gamma": 0.8,
}
"""Settings, with torchdeq's defaults, that tune another solver or an approximation to the gradient."""

UNSUPPORTED = {"n_states": 1, "indexing": []}
"""Settings, with torchdeq's defaults, that ask for states on the way, which are not kept."""

ELSEWHERE = ("norm_", "sn_", "jac_", "sradius_mode")
"""Beginnings of settings that other parts of torchdeq read from the same configuration."""


class DEQReversible(DEQBase):
    """A torchdeq core whose gradient is that of the iteration itself (see `revdeq.solve`).

    beta: the relaxation, in (0, 2) and not 1.
    f_max_iter: evaluations of f, an even number.
    f_tol: stop after the first step whose relative change is at most this.
    eval_factor, eval_f_max_iter: as in torchdeq, in evaluations.
    no_stat: leave out the statistics, which cost one more evaluation of f.
    """

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        config = DEQConfig(args)
        config.update(**kwargs)
        given = {k: v for k, v in config.config.items() if v is not None}
        _check_keywords(given)
        super().__init__(args=config)
        self.beta = given.get("beta", 0.5)
        self.tol = given.get("f_tol")
        self.f_max_iter = given.get("f_max_iter", 40)
        scaled = 2 * int(self.f_max_iter * given.get("eval_factor", 1) / 2)
        self.eval_f_max_iter = given.get("eval_f_max_iter") or scaled
        self.no_stat = bool(given.get("no_stat", False))
        checked_beta(self.beta), checked_tol(self.tol)
        _steps(self.f_max_iter, "f_max_iter"), _steps(self.eval_f_max_iter, "eval_f_max_iter")

    def forward(
        self,
        func: Any,
        z_init: Any,
        solver_kwargs: dict[str, Any] | None = None,
        sradius_mode: bool = False,
        backward_writer: Any = None,
        **kwargs: Any,
    ) -> tuple[list[Any], SolverStat]:
        solver_kwargs = dict(solver_kwargs or {})
        f_max_iter = solver_kwargs.pop("f_max_iter", self.f_max_iter if self.training else self.eval_f_max_iter)
        tol = solver_kwargs.pop("tol", self.tol)
        if solver_kwargs or kwargs:
            unknown = ", ".join(sorted({*solver_kwargs, *kwargs}))
            raise TypeError(
                f"the core 'reversible' does not take {unknown}: it takes f_max_iter and tol in solver_kwargs"
            )
        if backward_writer is not None:
            warnings.warn(
                "the core 'reversible' solves no backward system: backward_writer is not called", stacklevel=2
            )
        several = isinstance(z_init, (tuple, list))
        initial = tuple(z_init) if several else z_init

        def f(z: Any) -> Any:
            return tuple(func(*z)) if several else func(z)

        solution = solve(f, initial, beta=self.beta, max_steps=_steps(f_max_iter, "f_max_iter"), tol=tol)
        z = list(solution.z) if several else solution.z
        return [z], self._statistics(f, solution, sradius_mode and not self.training)

    def _statistics(self, f: Any, solution: Any, sradius_mode: bool) -> SolverStat:
        if self.no_stat:
            info = SolverStat(nstep=torch.tensor([float(solution.nfe)]))
        else:
            with torch.no_grad():
                z = solution.z if isinstance(solution.z, tuple) else (solution.z,)
                fz = f(solution.z)
                info = SolverStat.from_final_step(
                    _by_sample(z), _by_sample(fz if isinstance(fz, tuple) else (fz,)), solution.nfe
                )
        if sradius_mode:
            if isinstance(solution.z, tuple):
                raise TypeError(
                    f"sradius_mode = True needs a state of one tensor, not of {len(solution.z)}: leave it out"
                )
            info["sradius"] = self._sradius(f, solution.z.detach().clone())
        return info


def _by_sample(state: tuple[Tensor, ...]) -> Tensor:
    """The state as one vector per sample."""
    return torch.cat([x.flatten(1) if x.dim() > 1 else x.reshape(-1, 1) for x in state], 1)


def _steps(f_max_iter: Any, name: str) -> int:
    if not isinstance(f_max_iter, (int, float)) or f_max_iter < 2 or f_max_iter % 2 != 0:
        raise ValueError(f"{name} = {f_max_iter!r} must be even and at least 2: a reversible step evaluates f twice")
    return int(f_max_iter) // 2


def _check_keywords(given: dict[str, Any]) -> None:
    """A configuration may be that of a whole program, so that what is unknown need not be meant for a core."""
    strange = []
    for name, value in given.items():
        if name in UNSUPPORTED and value != UNSUPPORTED[name]:
            raise ValueError(f"{name} = {value!r}: the core 'reversible' keeps no states on the way; leave it out")
        if name in MEANINGLESS and value != MEANINGLESS[name]:
            warnings.warn(
                f"{name} = {value!r} means nothing to the core 'reversible', whose gradient is exact: leave it out",
                stacklevel=5,
            )
        if name in (*KNOWN, *MEANINGLESS, *UNSUPPORTED) or name.startswith(ELSEWHERE):
            continue
        if close := difflib.get_close_matches(name, KNOWN, n=1):
            raise TypeError(f"unknown keyword {name} = {value!r}: did you mean {close[0]}?")
        strange.append(name)
    if strange:
        warnings.warn(
            f"the core 'reversible' does not use {', '.join(sorted(strange))}: it takes {', '.join(KNOWN)}",
            stacklevel=5,
        )


torchdeq.register_deq("reversible", DEQReversible)
