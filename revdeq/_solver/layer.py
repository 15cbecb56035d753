"""revdeq.RevDEQ: the reversible equilibrium as a layer."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .check import Statistics
from .iteration import relative_change
from .options import NAMES, Options, options_from, with_options
from .schedule import CLOSEST_TO_1
from .solve import Solution, checked_f, solve, steps
from .tune import OPTIONS, Tuning, tune
from .unrolled import is_traced


class Last(NamedTuple):
    """Statistics of the last call of a layer, as in `revdeq.Solution`."""

    steps: Any
    nfe: int
    adjoint: Statistics
    norms: Tensor | None = None
    known: Tensor | None = None

    @property
    def change(self) -> Tensor | None:
        return self.known if self.norms is None else relative_change(self.norms)


class RevDEQ(nn.Module):
    """A layer that outputs the fixed point z = f(z, x), computed by `revdeq.solve`.

    The options are attributes of the same names, and may be changed between calls.

    Args:
        f: A module, which becomes a submodule of the layer, or any callable; it is called as f(z, x, *args).
        {options}

    Attributes:
        last: `steps`, `nfe`, `change` and `adjoint` of the last call, as in `revdeq.Solution`, without a graph. None
            before the first call.

    Raises:
        TypeError, ValueError: An option is unknown or invalid.

    Example:
        >>> deq = revdeq.RevDEQ(Block(8), beta=0.8, max_steps=12)
        >>> z = deq(x)
        >>> deq.last.nfe
        24
    """

    last: Last | None

    if TYPE_CHECKING:  # the options are attributes

        def __getattr__(self, name: str) -> Any: ...

    @with_options
    def __init__(self, f: Callable[..., Any], **options: Any) -> None:
        super().__init__()
        self.f, self.last, self._is_tuned = checked_f(f), None, False
        checked = options_from(options)
        for name in NAMES:
            setattr(self, name, getattr(checked, name))

    def forward(self, x: Any, *args: Any, z0: Any = None, y0: Any = None, max_steps: int | None = None, **kwargs: Any) -> Any:
        """The fixed point of f(., x, *args, **kwargs).

        Args:
            x: The argument of f after the state: a tensor, or a nested tuple, list or dict of tensors.
            args: Further arguments of f.
            z0: The initial state. None is zeros with the shape of x.
            y0: The initial y, if it is not z0.
            max_steps: The number of steps of this call, if it differs.
            kwargs: Keyword arguments for f.

        Returns:
            z, with the structure of z0.
        """
        solution = solve(self.f, _start(x, z0), x, *args, y0=y0, kwargs=kwargs, **self._used(max_steps))
        if not is_traced():  # it would contain a tensor of the tracer
            self.last = Last(solution.steps, solution.nfe, solution.adjoint, solution.norms)
        return solution.z

    def steps(
        self, x: Any, *args: Any, z0: Any = None, y0: Any = None, max_steps: int | None = None, **kwargs: Any
    ) -> Iterator[Solution]:
        """Iterate step by step, like `revdeq.steps`, with the arguments of a call of the layer."""
        return steps(self.f, _start(x, z0), x, *args, y0=y0, kwargs=kwargs, **self._used(max_steps))

    def tune(
        self, x: Any, *args: Any, z0: Any = None, schedule: bool = False, batches: Sequence[Any] = (), **kwargs: Any
    ) -> Tuning:
        """Tune the layer's beta and gamma, or its schedule, for this input by `revdeq.tune`. They are saved with the
        layer. With torch.distributed, all processes must call it, and get those of the first one.

        Args:
            x, args, z0, kwargs: As for a call of the layer.
            schedule: Whether to find a pair for every half-step.
            batches: More inputs to tune for, each a tuple (x, *args).

        Returns:
            A `revdeq.Tuning`, with the result and all trials.
        """
        options = {name: getattr(self, name) for name in OPTIONS}
        if abs(1 - self.beta) < CLOSEST_TO_1:  # the search cannot start there
            options["beta"] = 1 - CLOSEST_TO_1
        more = [(_start(batch[0], None), *batch) for batch in batches]
        found = tune(self.f, _start(x, z0), x, *args, schedule=schedule, batches=more, kwargs=kwargs, **options)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            shared = [found]
            torch.distributed.broadcast_object_list(shared, src=0)
            (found,) = shared
        self.use(found.beta, found.gamma, found.schedule)
        return found

    def use(self, beta: float, gamma: float, schedule: Any = None) -> None:
        """Set beta, gamma and the schedule, and save them with the layer."""
        checked = options_from({**self.options, "beta": beta, "gamma": gamma, "schedule": schedule})
        self.beta, self.gamma, self.schedule, self._is_tuned = checked.beta, checked.gamma, checked.schedule, True

    @property
    def options(self) -> dict[str, Any]:
        """The current options, as keyword arguments of `revdeq.solve`."""
        return {name: getattr(self, name) for name in NAMES}

    def _used(self, max_steps: int | None) -> dict[str, Any]:
        return self.options if max_steps is None else {**self.options, "max_steps": max_steps}

    def get_extra_state(self) -> Any:
        """The tuned coefficients, for `state_dict`."""
        return (self.beta, self.gamma, self.schedule) if self._is_tuned else None

    def set_extra_state(self, state: Any) -> None:
        if state is not None:
            self.use(*state)

    def extra_repr(self) -> str:
        usual = Options()
        shown = {k: v for k, v in self.options.items() if k in ("beta", "max_steps") or v != getattr(usual, k)}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())


with_options(RevDEQ)


def tune_layers(model: nn.Module, *args: Any, schedule: bool = False) -> dict[str, Tuning]:
    """Tune each layer of a model for the input that it gets when the model is called. Returns the results by name."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, RevDEQ)}
    calls: dict[Any, tuple[Any, Any]] = {}
    hooks = [
        layer.register_forward_pre_hook(lambda m, a, k: calls.__setitem__(m, (a, k)), with_kwargs=True)
        for layer in layers.values()
    ]
    try:
        with torch.no_grad():
            model(*args)
    finally:
        for hook in hooks:
            hook.remove()
    return {
        name: layer.tune(*calls[layer][0], **calls[layer][1], schedule=schedule)
        for name, layer in layers.items()
        if layer in calls
    }


def _start(x: Any, z0: Any) -> Any:
    return tree_map(_zeros_like, x) if z0 is None else z0


def _zeros_like(x: Any) -> Tensor:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"x is of type {getattr(x, 'dtype', type(x))}: if it is no float tensor, pass z0, the initial state")
    return torch.zeros_like(x, requires_grad=False)
