"""revdeq.RevDEQ: the reversible equilibrium as a layer."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .scheme import Exact, checked_radix
from .solve import checked_beta, checked_check, checked_f, checked_max_steps, checked_tol, solve
from .unrolled import is_traced


class Last(NamedTuple):
    """What the last call of a layer did."""

    steps: int
    nfe: int
    residual: Tensor


class RevDEQ(nn.Module):
    """A layer whose output is z = f(z, x), found by `revdeq.solve`, which documents the arguments.

    last: steps, nfe and residual of the last call.
    """

    last: Last | None

    def __init__(
        self,
        f: Callable[..., Any],
        beta: float = 0.5,
        max_steps: int = 8,
        tol: float | None = None,
        state: str | Exact = "float64",
        check: str | None = "warn",
    ) -> None:
        super().__init__()
        checked_f(f), checked_beta(beta), checked_max_steps(max_steps), checked_tol(tol), checked_check(check)
        checked_radix(state, beta)
        self.f = f
        self.beta, self.max_steps, self.tol, self.state, self.check = beta, max_steps, tol, state, check
        self.last = None

    def forward(self, x: Any, *args: Any, z0: Any = None) -> Any:
        """The fixed point of f(., x, *args), starting from z0 or, by default, from zeros shaped like x."""
        if z0 is None:
            z0 = tree_map(_zeros_like, x)
        settings: dict[str, Any] = {
            "beta": self.beta,
            "max_steps": self.max_steps,
            "tol": self.tol,
            "state": self.state,
            "check": self.check,
        }
        solution = solve(self.f, z0, x, *args, **settings)
        if not is_traced():  # there, it would be a tensor of the tracer's
            self.last = Last(solution.steps, solution.nfe, solution.residual)
        return solution.z

    def extra_repr(self) -> str:
        return (
            f"beta={self.beta}, max_steps={self.max_steps}, tol={self.tol}, state={self.state!r}, check={self.check!r}"
        )


def _zeros_like(x: Any) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"x is of type {type(x).__name__}: where it is not a tensor, pass z0, the state to start from")
    if not x.is_floating_point():
        raise TypeError(f"x is {x.dtype}: where it is not of floating point, pass z0, the state to start from")
    return torch.zeros_like(x, requires_grad=False)
