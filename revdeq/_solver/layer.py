"""revdeq.RevDEQ: the reversible equilibrium as a layer."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .monitor import Adjoint
from .norms import relative_changes
from .options import NAMES, Options, documented, options_from, with_options
from .schedule import CLOSEST_TO_1, inside
from .scheme import radix_of
from .solve import Solution, checked_f, learnt, renamed, solve, steps
from .tune import OPTIONS, Tuning, tune
from .unrolled import is_traced


class Last(NamedTuple):
    """Statistics of the last call of a layer, as in `revdeq.Solution`.

    norms: those from which `change` is computed when it is read, or `known`, the change itself.
    """

    steps: Any
    nfe: int
    adjoint: Adjoint
    norms: Tensor | None = None
    known: Tensor | None = None

    def __repr__(self) -> str:
        return f"Last(steps={self.steps}, nfe={self.nfe}, change={self.change}, adjoint={self.adjoint})"

    @property
    def change(self) -> Tensor:
        if self.known is not None:
            return self.known
        assert self.norms is not None
        return relative_changes(self.norms)

    @property
    def residual(self) -> Tensor:
        """The old name of `change`."""
        return renamed(self.change, "last.residual", "last.change")


class RevDEQ(nn.Module):
    """A layer that outputs the fixed point z = f(z, x), computed by `revdeq.solve`.

    The options are attributes of the same names, and may be changed between calls: for example `deq.max_steps = 32`
    before an evaluation.

    Args:
        f: A module, which becomes a submodule of the layer, or any callable; it is called as f(z, x, *args).
        learn_coefficients: True makes the beta and gamma of each of the 2 * max_steps half-steps trainable parameters
            of the layer; "pair" makes one pair for all half-steps trainable.
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
    coefficients: Tensor
    learnt: nn.Parameter | None

    if TYPE_CHECKING:  # the options are attributes

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    @with_options()
    def __init__(self, f: Callable[..., Any], *, learn_coefficients: bool | str = False, **options: Any) -> None:
        super().__init__()
        self.f = checked_f(f)
        checked = options_from(options)
        if learnt(options) is not None:
            raise ValueError(
                "schedule requires a gradient, which the layer would not return: use learn_coefficients=True, which "
                "starts from schedule.detach(), or revdeq.solve"
            )
        radix_of(checked)
        for name in NAMES:
            setattr(self, name, getattr(checked, name))
        self.last = None
        # Of `use`, in a buffer, so that they are saved, broadcast and averaged: zeros until then.
        self.register_buffer("coefficients", torch.zeros(1, 2, dtype=torch.float64))
        self._is_used, self._seen = False, self.coefficients._version
        self._written = [(0.0, 0.0)]
        self.register_parameter("learnt", None)
        if learn_coefficients not in (True, False, "pair"):
            raise ValueError(f"learn_coefficients = {learn_coefficients!r} must be True, False or 'pair'")
        if learn_coefficients:
            rows = 1 if learn_coefficients == "pair" else 2 * self.max_steps
            pairs = [*(self.schedule or ())[:rows], *[(self.beta, self.gamma)] * rows][:rows]
            self.learnt = nn.Parameter(torch.tensor(pairs, dtype=torch.float32))

    def forward(
        self, x: Any, *args: Any, z0: Any = None, y0: Any = None, max_steps: int | None = None, **kwargs: Any
    ) -> Any:
        """The fixed point of f(., x, *args, **kwargs).

        Args:
            x: The argument of f after the state: a tensor, or a nested tuple, list or dict of tensors.
            args: Further arguments of f.
            z0: The initial state, or a `revdeq.Solution` to continue. None is zeros with the shape of x.
            y0: The initial y, if it is not z0.
            max_steps: The number of steps of this call, if it differs.
            kwargs: Keyword arguments for f.

        Returns:
            z, with the structure of z0.
        """
        solution = solve(self.f, self._start(x, z0), x, *args, y0=y0, kwargs=kwargs, **self._used(max_steps, z0))
        if not is_traced():  # it would contain a tensor of the tracer
            self.last = Last(solution.steps, solution.nfe, solution.adjoint, solution.norms)
        return solution.z

    def steps(
        self, x: Any, *args: Any, z0: Any = None, y0: Any = None, max_steps: int | None = None, **kwargs: Any
    ) -> Iterator[Solution]:
        """Iterate step by step, like `revdeq.steps`.

        Args:
            x, args, z0, y0, max_steps, kwargs: As for a call of the layer.

        Returns:
            An iterator over a `revdeq.Solution` for each step.
        """
        return steps(self.f, self._start(x, z0), x, *args, y0=y0, kwargs=kwargs, **self._used(max_steps, z0))

    def tune(
        self,
        x: Any,
        *args: Any,
        z0: Any = None,
        schedule: bool = False,
        batches: Sequence[tuple[Any, ...]] = (),
        **kwargs: Any,
    ) -> Tuning:
        """Tune the layer's beta and gamma, or its schedule, for this input by `revdeq.tune`.

        The coefficients become part of the layer's `state_dict`. With torch.distributed, all processes must call it,
        and get those of the first one: a process that calls it alone waits for the others, until torch's timeout or
        their next collective operation. To tune on a single process, use `revdeq.tune` and `use`.

        Args:
            x, args, z0: As for a call of the layer.
            schedule: Whether to find a pair for every half-step, as `revdeq.tune` does.
            batches: More inputs to tune for, each a tuple (x, *args).
            kwargs: As for a call of the layer.

        Returns:
            A `revdeq.Tuning`, with the result and all trials.
        """
        beta = self.beta
        if abs(1 - beta) < CLOSEST_TO_1:  # the search cannot start there
            beta = 1 - CLOSEST_TO_1
        options = {"beta": beta, **{name: getattr(self, name) for name in OPTIONS if name != "beta"}}
        more = [(self._start(batch[0], None), *batch) for batch in batches]
        given: dict[str, Any] = {"schedule": schedule, "batches": more, "kwargs": kwargs}
        found = _of_the_first_process(tune(self.f, self._start(x, z0), x, *args, **given, **options))
        self.use(found.beta, found.gamma, found.schedule)
        return found

    def use(self, beta: float, gamma: float, schedule: Any = None) -> None:
        """Set beta, gamma and the schedule, as part of the layer's `state_dict`.

        Args:
            beta: The relaxation.
            gamma: The damping of f.
            schedule: A pair for every half-step, as for `revdeq.solve`.

        Raises:
            TypeError, ValueError: A coefficient is invalid.
        """
        checked = options_from({**self.options, "beta": beta, "gamma": gamma, "schedule": schedule})
        self.beta, self.gamma, self.schedule, self._is_used = float(beta), float(gamma), checked.schedule, True
        self._write()
        if self.learnt is not None:
            with torch.no_grad():
                pairs = [*checked.pairs, *[(beta, gamma)] * len(self.learnt)][: len(self.learnt)]
                self.learnt.copy_(torch.tensor(pairs))

    @property
    def options(self) -> dict[str, Any]:
        """The current options, as keyword arguments of `revdeq.solve`."""
        if not torch.compiler.is_compiling():
            self._read()
        return {name: getattr(self, name) for name in NAMES}

    def _used(self, max_steps: int | None, z0: Any = None) -> dict[str, Any]:
        """The options of a call. z0: a solution that it continues, if any."""
        options, before = self.options, z0.carry.evaluations if isinstance(z0, Solution) and z0.carry else 0
        if max_steps is not None:
            options["max_steps"] = max_steps
        if self.learnt is not None:
            rows = before + 2 * options["max_steps"] if len(self.learnt) == 1 else len(self.learnt)
            options["schedule"] = inside(self.learnt).expand(rows, 2)
        return options

    def _read(self) -> None:
        """Use what was written into the buffer: loaded, broadcast or averaged."""
        if self.coefficients._version != self._seen:
            self._seen = self.coefficients._version
            self._take(self.coefficients)

    def _take(self, coefficients: Tensor) -> None:
        (beta, gamma), *schedule = coefficients.tolist()
        if beta != 0:
            self.use(beta, gamma, schedule or None)

    def _write(self) -> None:
        """Update the buffer, which stays float64 when the weights are converted, and stays the tensor that DDP
        broadcasts. Unless it changes, its memory is that of earlier state dicts."""
        pairs = [(self.beta, self.gamma), *(self.schedule or ())] if self._is_used else [(0.0, 0.0)]
        if pairs != self._written:
            self.coefficients.data = torch.tensor(pairs, dtype=torch.float64, device=self.coefficients.device)
            self._written, self._seen = pairs, self.coefficients._version

    def _start(self, x: Any, z0: Any) -> Any:
        if isinstance(x, torch.fx.Proxy):
            raise TypeError(
                "x is a Proxy of torch.fx.symbolic_trace, and a solve is no graph of operations: use torch.export or "
                "make_fx, or trace with a torch.fx.Tracer whose is_leaf_module is True for RevDEQ"
            )
        return tree_map(_zeros_like, x) if z0 is None else z0

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        self._read()
        super()._apply(fn, recurse)
        self._written = []
        self._write()
        return self

    def _save_to_state_dict(self, *args: Any) -> None:
        self._read()
        self._write()  # the attributes may have been changed
        super()._save_to_state_dict(*args)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """A state dict without coefficients, or from before `use`, leaves the current ones unchanged."""
        name = f"{prefix}coefficients"
        if name in state_dict:
            self._take(state_dict[name].view(-1, 2))  # earlier versions saved one pair
        state_dict[name] = self.coefficients
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._seen = self.coefficients._version

    def extra_repr(self) -> str:
        usual = Options()
        shown = {k: v for k, v in self.options.items() if k in ("beta", "max_steps") or v != getattr(usual, k)}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())


def _of_the_first_process(found: Tuning) -> Tuning:
    """Each has another part of the data, and with other coefficients it would be another model."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return found
    shared = [found]
    torch.distributed.broadcast_object_list(shared, src=0)
    return shared[0]


def tune_layers(model: nn.Module, *args: Any, schedule: bool = False) -> dict[str, Tuning]:
    """Tune each layer of a model for the input that it gets when the model is called. Returns the results by name."""
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
    return {name: layer.tune(*args, **keywords, schedule=schedule) for name, layer, args, keywords in called}


RevDEQ.__doc__ = documented(RevDEQ.__doc__ or "")


def _zeros_like(x: Any) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"x is of type {type(x).__name__}: if it is not a tensor, pass z0, the initial state")
    if not x.is_floating_point():
        raise TypeError(f"x is {x.dtype}: if it is not floating point, pass z0, the initial state")
    return torch.zeros_like(x, requires_grad=False)
