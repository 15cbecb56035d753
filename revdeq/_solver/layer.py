"""revdeq.RevDEQ: the reversible equilibrium as a layer."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from typing_extensions import Unpack

from .options import NAMES, Exact, Keywords, Options, options_from
from .solve import Solution, checked_f, solve, steps
from .state import is_traced
from .tune import Tuning, tune


class RevDEQ(nn.Module):
    """A layer that outputs the fixed point z = f(z, x), computed by `revdeq.solve`.

    The options are attributes of the same names, and may be changed between calls.

    Args:
        f: A module, which becomes a submodule of the layer, or any callable; it is called as f(z, x, *args).
        options: The options of `revdeq.solve`, which `revdeq.Options` explains.

    Attributes:
        last: What the last call did: its `revdeq.Solution` without z, y and aux, and so without a gap. None before the
            first call.

    Raises:
        TypeError, ValueError: An option is unknown or invalid.

    Example:
        >>> deq = revdeq.RevDEQ(Block(8), beta=0.8, max_steps=12)
        >>> z = deq(x)
        >>> deq.last.nfe
        24
    """

    f: Callable[..., Any]
    last: Solution | None
    beta: float
    gamma: float
    max_steps: int
    tol: float | None
    per_example: bool
    indexed: bool
    aux: bool | str
    state: str | Exact
    check: str | None
    gradient: str
    keep: int

    def __init__(self, f: Callable[..., Any], **options: Unpack[Keywords]) -> None:
        super().__init__()
        self.f, self.last, self._is_tuned = checked_f(f), None, False
        checked = options_from(options)
        for name in NAMES:
            setattr(self, name, getattr(checked, name))

    def forward(
        self, x: Any, *args: Any, z0: Any = None, y0: Any = None, max_steps: int | None = None, **kwargs: Any
    ) -> Any:
        """The fixed point of f(., x, *args, **kwargs).

        Args:
            x: The argument of f after the state: a tensor, or a nested tuple, list or dict of tensors.
            args: Further arguments of f.
            z0: The initial state. None is zeros with the shape of x.
            y0: The initial y, if it is not z0.
            max_steps: The number of steps of this call, if it differs.
            kwargs: Keyword arguments for f.

        Returns:
            z, with the structure of z0; with aux=True, a pair of z and the auxiliary output.
        """
        solution = solve(self.f, start(x, z0), x, *args, y0=y0, kwargs=kwargs, **self._options(max_steps))
        if not is_traced([solution.norms]):  # it would contain a tensor of the tracer
            self.last = replace(solution, z=None, y=None, aux=None)
        return (solution.z, solution.aux) if self.aux else solution.z

    def steps(
        self, x: Any, *args: Any, z0: Any = None, y0: Any = None, max_steps: int | None = None, **kwargs: Any
    ) -> Iterator[Solution]:
        """Iterate step by step, like `revdeq.steps`, with the arguments of a call of the layer."""
        return steps(self.f, start(x, z0), x, *args, y0=y0, kwargs=kwargs, **self._options(max_steps))

    def tune(self, x: Any, *args: Any, z0: Any = None, batches: Sequence[Any] = (), **kwargs: Any) -> Tuning:
        """Find beta, gamma and the state for this input by `revdeq.tune`, and set them. They are saved with the layer.
        With torch.distributed, all processes must call it, and get those of the first one.

        Args:
            x, args, z0, kwargs: As for a call of the layer.
            batches: More inputs to tune for, each a tuple (x, *args).

        Returns:
            A `revdeq.Tuning`, with the result and all trials.

        Raises:
            RuntimeError: A solve with the result fails; then the layer is as before.
        """
        more = [(start(batch[0], None), *batch) for batch in batches]
        found = tune(self.f, start(x, z0), x, *args, batches=more, kwargs=kwargs, **self.options)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            shared = [found]
            torch.distributed.broadcast_object_list(shared, src=0)
            (found,) = shared
        self.use(found.beta, found.gamma, found.state)
        return found

    def use(self, beta: float, gamma: float, state: str | Exact) -> None:
        """Set beta, gamma and the state, and save them with the layer."""
        options_from({**self.options, "beta": beta, "gamma": gamma, "state": state})
        self.beta, self.gamma, self.state, self._is_tuned = beta, gamma, state, True

    @property
    def options(self) -> Keywords:
        """The current options, as keyword arguments of `revdeq.solve`."""
        return self._options(None)

    def _options(self, max_steps: int | None) -> Any:
        options = {name: getattr(self, name) for name in NAMES}
        return options if max_steps is None else {**options, "max_steps": max_steps}

    def get_extra_state(self) -> Any:
        """The tuned coefficients and the number of fraction bits, for `state_dict`."""
        if not self._is_tuned:
            return None
        bits = self.state.fraction_bits if isinstance(self.state, Exact) else None
        return self.beta, self.gamma, self.state if bits is None else bits

    def set_extra_state(self, state: Any) -> None:
        """Take the coefficients and the state of a saved layer."""
        if state is not None:
            beta, gamma, kind = state
            self.use(beta, gamma, Exact(kind) if isinstance(kind, int) else kind)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Release 0.3 saved the coefficients in a tensor: a pair, or zeros if it was not tuned, and then a schedule.

        Raises:
            ValueError: The layer was saved with a schedule, which is no longer supported.
        """
        saved = state_dict.pop(f"{prefix}coefficients", None)
        if saved is not None:
            (beta, gamma), *schedule = saved.reshape(-1, 2).tolist()
            if schedule:
                raise ValueError("the layer was saved with a schedule, which revdeq 0.4 has not: tune it again")
            state_dict[f"{prefix}_extra_state"] = (beta, gamma, self.state) if beta else None
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        usual = Options()
        shown = {k: v for k, v in self.options.items() if k in ("beta", "max_steps") or v != getattr(usual, k)}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())


def start(x: Any, z0: Any) -> Any:
    """The initial state: by default, zeros like x."""

    def zeros(x: Any) -> Tensor:
        if isinstance(x, Tensor) and x.is_floating_point():
            return torch.zeros_like(x, requires_grad=False)
        raise TypeError(f"x is of type {getattr(x, 'dtype', type(x))}: if it is no float tensor, pass z0")

    return tree_map(zeros, x) if z0 is None else z0
