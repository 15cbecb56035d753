"""What the reversible solver is compared with: the same iteration with plain autograd, which stores the graph of every
evaluation of f, or with `torch.utils.checkpoint`, which stores the states; and the classical equilibrium layer."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_structure
from torch.utils.checkpoint import checkpoint
from typing_extensions import Unpack

from ._solver.layer import RevDEQ
from ._solver.options import Keywords, Options
from ._solver.precision import coefficients
from ._solver.repeatable import Repeatable
from ._solver.state import State, flattened_like, flattened_state, structured
from ._solver.unrolled import unrolled

__all__ = ["Anderson", "checkpointed", "stored_graph"]


def stored_graph(
    f: Callable[..., Any], z0: Any, *args: Any, beta: float = 0.5, gamma: float = 1.0, max_steps: int = 8
) -> Any:
    """The same bits as `revdeq.solve(...).z` with a float64 state, differentiated by plain autograd.

    Memory grows with `max_steps`: the graph of every evaluation is stored.

    Args:
        f: As for `revdeq.solve`, except that dropout draws a new mask in every evaluation.
        z0, args, beta, gamma, max_steps: As for `revdeq.solve`.

    Returns:
        z, shaped like z0.

    Example:
        >>> z = revdeq.baselines.stored_graph(f, z0, x, max_steps=4)
        >>> torch.equal(z, revdeq.solve(f, z0, x, max_steps=4).z)
        True
    """
    return _unrolled(f, z0, args, beta, gamma, max_steps)


def checkpointed(
    f: Callable[..., Any], z0: Any, *args: Any, beta: float = 0.5, gamma: float = 1.0, max_steps: int = 8
) -> Any:
    """The same as `stored_graph`, with `torch.utils.checkpoint` around every half-step: only the states are stored, and
    the backward pass computes the rest again.

    Args:
        f, z0, args, beta, gamma, max_steps: As for `stored_graph`.

    Returns:
        z, shaped like z0.

    Example:
        >>> z = revdeq.baselines.checkpointed(f, z0, x, max_steps=4)
        >>> torch.equal(z, revdeq.solve(f, z0, x, max_steps=4).z)
        True
    """
    around = functools.partial(checkpoint, use_reentrant=False)
    return _unrolled(f, z0, args, beta, gamma, max_steps, around=around)


def _unrolled(f: Any, z0: Any, args: Any, beta: float, gamma: float, max_steps: int, **around: Any) -> Any:
    options = Options(beta=beta, gamma=gamma, max_steps=max_steps)
    z, spec = flattened_state(z0)

    def called(state: State, k: int) -> State:
        return flattened_like(f(structured(state, spec), *args), state, spec)

    return structured(unrolled(called, z, z, coefficients(beta, gamma), options, **around)[1], spec)


class Found(NamedTuple):
    """Statistics of a call of `Anderson`."""

    steps: float
    nfe: int
    change: Tensor
    converged: bool | None


class Anderson(RevDEQ):
    """The classical equilibrium layer, by torchdeq: Anderson acceleration in both passes, and the implicit gradient.

    All evaluations of a call have the same dropout mask.

    Args:
        f: A module f(z, x).
        evaluations: The maximum number of evaluations of f in the forward pass, and of vector-Jacobian products in the
            backward pass, at least 3. None is 2 * max_steps. The gradient takes one more evaluation of f.
        options: Those of `revdeq.RevDEQ`, of which two are used: max_steps, and tol, the relative residual at which
            both passes stop.

    Raises:
        ImportError: torchdeq is not installed.
        ValueError: There are too few evaluations.

    Example:
        >>> deq = revdeq.baselines.Anderson(Block(8), evaluations=12)
        >>> deq(x).shape
        torch.Size([4, 8])
    """

    def __init__(self, f: Callable[..., Any], *, evaluations: int | None = None, **options: Unpack[Keywords]) -> None:
        import torchdeq  # noqa: F401, raises here, and not in the first call, if it is missing

        super().__init__(f, **options)
        self.evaluations = evaluations
        if self._most < 3:
            raise ValueError(f"evaluations = {self._most} must be at least 3: the first two start the acceleration")

    @property
    def _most(self) -> int:
        return 2 * self.max_steps if self.evaluations is None else self.evaluations

    def forward(self, x: Tensor, *, z0: Tensor | None = None) -> Tensor:  # type: ignore[override]
        import torchdeq

        kind, calls = x.device.type, 0
        start = torch.zeros_like(x, requires_grad=False) if z0 is None else z0
        run = Repeatable(self.f, [start], tree_structure(start), (x,))
        autocast = functools.partial(
            torch.autocast, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        )

        def f(z: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            with autocast():
                return run([z], calls)[0].to(z.dtype)

        forward = {"f_solver": "anderson", "f_max_iter": self._most, "f_tol": self.tol or 0.0, "f_stop_mode": "rel"}
        backward = {"b" + name[1:]: value for name, value in forward.items()}
        deq = torchdeq.get_deq(ift=True, **forward, **backward)
        deq.train(torch.is_grad_enabled())  # torchdeq computes gradients in training mode only
        with torch.autocast(kind, enabled=False):  # a Gram matrix in bfloat16 would be singular
            (z,), info = deq(f, start)
        change = info["rel_lowest"].mean()
        self.last = Found(calls / 2, calls, change, None if self.tol is None else bool(change <= self.tol))  # type: ignore[assignment]
        return z
