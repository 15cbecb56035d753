"""The reversible solver in programs written for torchdeq.

    import revdeq.torchdeq
    deq = torchdeq.get_deq(core="reversible", f_max_iter=8, beta=0.5)
    z_out, info = deq(f, z0)          # z_out[-1] is the fixed point, info a SolverStat, as with any core

A program with torchdeq's command line runs with `--core reversible`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

try:
    import torchdeq
except ModuleNotFoundError:
    raise ModuleNotFoundError("revdeq.torchdeq needs torchdeq: pip install torchdeq") from None
from torchdeq.core import DEQBase
from torchdeq.solver.stat import SolverStat
from torchdeq.utils.layer_utils import deq_decorator

from ._solver.options import Options
from ._solver.solve import solve, steps

__all__ = ["DEQReversible"]

OPTIONS = {field.name for field in dataclasses.fields(Options)} - {"max_steps", "tol"}
"""Options of `revdeq.solve` that have no other name in torchdeq."""


class DEQReversible(DEQBase):
    """A torchdeq core with the exact gradient of its iteration (see `revdeq.solve`).

    Create it with `torchdeq.get_deq(core="reversible", ...)`, which takes these settings by name, or in `args`. As in
    torchdeq, it ignores the others; those of backward solvers and of approximate gradients have no meaning here.

    - f_max_iter: The number of evaluations of f, two per step; an odd number is rounded up. The default is 40.
    - f_tol: Stop after the first step whose relative change is at most this. By default, all evaluations are made.
    - eval_factor, eval_f_max_iter: As in torchdeq, the number of evaluations in evaluation mode.
    - n_states, indexing: In training mode, also return the states after these evaluations, as torchdeq counts them. The
      gradient goes through all of them.
    - no_stat: Skip the statistics, which take one more evaluation of f.
    - beta, state, check and the other options of `revdeq.solve`. With the prefix rev_ (`rev_beta`) they take precedence
      over names that a program uses for something else. gamma is always `rev_gamma`: torchdeq has a gamma.

    Args:
        args: A configuration of torchdeq: a Namespace, a dict or a DEQConfig.
        kwargs: Settings by name.

    Raises:
        ValueError: A setting has an invalid value.

    Example:
        >>> import torchdeq
        >>> import revdeq.torchdeq
        >>> deq = torchdeq.get_deq(core="reversible", f_max_iter=8, beta=0.5)
        >>> states, info = deq(lambda z: f(z, x), z0)
        >>> int(info["nstep"].max())
        8
    """

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        super().__init__(args, **kwargs)
        config = self.args.config
        self.options = {name: config[name] for name in OPTIONS - {"gamma"} if config.get(name) is not None}
        self.options |= {name: config[f"rev_{name}"] for name in OPTIONS if f"rev_{name}" in config}
        self.f_tol, self.no_stat = config.get("f_tol") or None, bool(config.get("no_stat", self.no_stat))
        for name in ("f_max_iter", "eval_f_max_iter"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} = {getattr(self, name)!r} must be at least 1: it counts evaluations of f")
        Options(**self.options, tol=self.f_tol)  # which checks them

    def forward(
        self,
        func: Callable[..., Any],
        z_init: Any,
        solver_kwargs: dict[str, Any] | None = None,
        sradius_mode: bool = False,
        backward_writer: Any = None,
        **kwargs: Any,
    ) -> tuple[list[Any], SolverStat]:
        """Solve z = func(z) from z_init by the reversible iteration.

        Args:
            func: A function of the state, or of as many tensors as z_init has, that returns as many.
            z_init: A tensor, or a tuple or list of tensors.
            solver_kwargs: f_max_iter for this call. Settings of other solvers are ignored.
            sradius_mode: In evaluation mode, add the spectral radius of func's Jacobian to the statistics.
            backward_writer: Is ignored: there is no backward solver.
            kwargs: Are ignored.

        Returns:
            The states, of which the last is the fixed point (in evaluation mode, that one only), and the statistics of
            the solver, whose nstep counts evaluations of func.
        """
        several = not isinstance(z_init, Tensor)

        def f(z: Any) -> Any:
            out = func(*z) if several else func(z)
            return tuple(out) if isinstance(out, list) else out

        usual = self.f_max_iter if self.training else self.eval_f_max_iter
        ends = self._ends((solver_kwargs or {}).get("f_max_iter", usual))
        options = {**self.options, "max_steps": ends[-1], "tol": self.f_tol}
        z0, found = tuple(z_init) if several else z_init, {}
        if len(ends) > 1:
            for number, solution in enumerate(steps(f, z0, **options), 1):
                if number in ends:
                    found[number] = solution.z
        else:
            solution = solve(f, z0, **options)
        z_out = [found.get(end, solution.z) for end in ends]
        info = self._statistics(func, solution, sradius_mode)
        return [list(z) if several else z for z in z_out], info

    def _ends(self, f_max_iter: int) -> list[int]:
        """The steps whose states are returned, of which the last is the last step."""
        n_states, indexing = self.args.get("n_states", 1), self.args.get("indexing") or ()
        evaluations = [f_max_iter]
        if self.training and n_states > 1:
            n = min(n_states, f_max_iter)
            evaluations = [f_max_iter - k * (f_max_iter // n) for k in reversed(range(n))]
        elif self.training:
            evaluations = [*(i for i in indexing if 0 < i < f_max_iter), f_max_iter]
        return [math.ceil(n / 2) for n in evaluations]

    def _statistics(self, func: Any, solution: Any, sradius_mode: bool) -> SolverStat:
        wrapped, z = deq_decorator(func, solution.z, no_stat=False)
        z = z.detach()
        if self.no_stat:
            info = SolverStat(nstep=torch.full(z.shape[:1], float(solution.nfe)))
        else:
            with torch.no_grad():
                info = SolverStat.from_final_step(z, wrapped(z), solution.nfe)
        if not self.training:
            info["sradius"] = self._sradius(wrapped, z.clone()) if sradius_mode else torch.zeros(1, device=z.device)
        return info


torchdeq.register_deq("reversible", DEQReversible)
