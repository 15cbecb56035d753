"""revdeq.RevDEQ: the reversible equilibrium as a layer."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .implicit import Adjoint
from .options import NAMES, Options, documented, options_from, with_options
from .scheme import radix_of
from .solve import checked_f, solve
from .tune import CLOSEST_TO_1, Tuning, tune
from .unrolled import is_traced

COEFFICIENTS = "coefficients"
"""The name of beta and gamma in the state of a layer that was tuned."""


class Last(NamedTuple):
    """What the last call of a layer did, as in `revdeq.Solution`."""

    steps: int
    nfe: int
    residual: Tensor
    adjoint: Adjoint | None = None


class RevDEQ(nn.Module):
    """A layer whose output is z = f(z, x), found by `revdeq.solve`.

    The options are attributes of the same names, and may be changed between calls: `deq.max_steps = 32` before an
    evaluation, for example.

    Args:
        f: A module, whose parameters are then the layer's, or any callable; it is called as f(z, x, *args).
        {options}

    Attributes:
        last: `steps`, `nfe`, `residual` and `adjoint` of the last call, as in `revdeq.Solution`, without a graph. None
            before the first call.

    Raises:
        TypeError, ValueError: An option is unknown, or has a value that it cannot have.

    Example:
        >>> deq = revdeq.RevDEQ(Block(8), beta=0.8, max_steps=12)
        >>> z = deq(x)
        >>> deq.last.nfe
        24
    """

    last: Last | None

    if TYPE_CHECKING:  # the options are attributes

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    @with_options
    def __init__(self, f: Callable[..., Any], **options: Any) -> None:
        super().__init__()
        self.f = checked_f(f)
        checked = options_from(options)
        radix_of(checked)
        for name in NAMES:
            setattr(self, name, getattr(checked, name))
        self.last = None
        self._is_tuned = False

    def forward(self, x: Any, *args: Any, z0: Any = None) -> Any:
        """The fixed point of f(., x, *args).

        Args:
            x: What f is called with beside its state: a tensor, or a nested tuple, list or dict of tensors.
            args: More of the same.
            z0: The state to start from. None starts from zeros shaped like x.

        Returns:
            z, shaped like z0.
        """
        solution = solve(self.f, self._start(x, z0), x, *args, **self.options)
        if not is_traced():  # there, it would be a tensor of the tracer's
            self.last = Last(solution.steps, solution.nfe, solution.residual, solution.adjoint)
        return solution.z

    def tune(self, x: Any, *args: Any, z0: Any = None) -> Tuning:
        """Set the layer's beta and gamma to those that `revdeq.tune` finds for this input.

        From then on they are saved and loaded with the layer, in its `state_dict`.

        Args:
            x: As for a call of the layer.
            args: As for a call of the layer.
            z0: As for a call of the layer.

        Returns:
            A `revdeq.Tuning`: what was tried, and what was found.
        """
        beta = self.beta
        if abs(1 - beta) < CLOSEST_TO_1:  # nothing to begin with
            beta = 1 - CLOSEST_TO_1
        options = {"beta": beta, "gamma": self.gamma, "max_steps": self.max_steps, "tol": self.tol}
        found = tune(self.f, self._start(x, z0), x, *args, **options)
        self.use(found.beta, found.gamma)
        return found

    def use(self, beta: float, gamma: float) -> None:
        """Set coefficients that were found elsewhere, to be saved and loaded with the layer.

        Args:
            beta: The relaxation.
            gamma: The damping of f.

        Raises:
            TypeError, ValueError: A coefficient has a value that it cannot have.
        """
        options_from({**self.options, "beta": beta, "gamma": gamma})
        self.beta, self.gamma, self._is_tuned = beta, gamma, True

    @property
    def coefficients(self) -> Tensor:
        """beta and gamma as the state of a layer that was tuned holds them."""
        return torch.tensor([self.beta, self.gamma], dtype=torch.float64, device="cpu")

    def _start(self, x: Any, z0: Any) -> Any:
        return tree_map(_zeros_like, x) if z0 is None else z0

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._is_tuned:
            destination[prefix + COEFFICIENTS] = self.coefficients

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, *args: Any
    ) -> None:
        found = state_dict.pop(prefix + COEFFICIENTS, None)
        if found is not None:
            self.use(*found.tolist())
        elif self._is_tuned:
            missing.append(prefix + COEFFICIENTS)
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *args)

    @property
    def options(self) -> dict[str, Any]:
        """The options as they are now, by name: the keywords that `revdeq.solve` is called with."""
        return {name: getattr(self, name) for name in NAMES}

    def extra_repr(self) -> str:
        usual = Options()
        shown = {k: v for k, v in self.options.items() if k in ("beta", "max_steps") or v != getattr(usual, k)}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())


def tune_layers(model: nn.Module, *args: Any) -> dict[str, Tuning]:
    """Tune each of a model's layers for the input that it gets when the model is called. What was found, by name."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, RevDEQ)}
    calls: dict[RevDEQ, tuple[Any, Any]] = {}

    def note(layer: nn.Module, args: Any, keywords: Any) -> None:
        calls[cast(RevDEQ, layer)] = args, keywords

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers.values()]
    try:
        with torch.no_grad():
            model(*args)
    finally:
        for hook in hooks:
            hook.remove()
    called = ((name, layer, *calls[layer]) for name, layer in layers.items() if layer in calls)
    return {name: layer.tune(*args, **keywords) for name, layer, args, keywords in called}


RevDEQ.__doc__ = documented(RevDEQ.__doc__ or "")


def _zeros_like(x: Any) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"x is of type {type(x).__name__}: where it is not a tensor, pass z0, the state to start from")
    if not x.is_floating_point():
        raise TypeError(f"x is {x.dtype}: where it is not of floating point, pass z0, the state to start from")
    return torch.zeros_like(x, requires_grad=False)
