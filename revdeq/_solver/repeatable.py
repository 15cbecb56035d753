"""f(z, *args), called the same way every time.

The backward pass evaluates f again, and its gradient is exact only if f returns the same. As torch.utils.checkpoint,
this rewinds torch's default generators and restores autocast; f with dropout has one mask, and so a fixed point.
"""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from .. import _device
from .state import State, flattened_like, structured

_version = attrgetter("_version")


class Repeatable:
    """f with a state given as a flat list of tensors.

    aux: the auxiliary output of the last evaluation, if f has any.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        spec: TreeSpec,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        device: torch.device,
        indexed: bool,
        has_aux: bool,
    ) -> None:
        self.f, self._spec, self._args, self._kwargs = f, spec, args, dict(kwargs)
        self._indexed, self.has_aux, self.aux = indexed, has_aux, None
        self._random, self._is_cuda, self._is_tensor = Random(device), device.type == "cuda", spec.is_leaf()
        self._kinds = ("cpu",) if device.type == "cpu" else ("cpu", device.type)
        self._context = self._contexts()
        self.autocasts = any(torch.is_autocast_enabled(kind) for kind in self._kinds)
        self._buffers = _versions_of_buffers(f)

    def __call__(self, read: State, k: int) -> State:
        """Evaluation k."""
        versions = [] if read[0].is_inference() else list(map(_version, read))
        if self._indexed:
            self._kwargs["evaluation"] = k
        call = self.f if not self._random.draws else self._random.bound(self.f)
        if self._is_cuda and torch.backends.cudnn.benchmark:  # might choose other algorithms in the other pass
            call = torch.backends.cudnn.flags(benchmark=False)(call)
        result = call(read[0] if self._is_tensor else structured(read, self._spec), *self._args, **self._kwargs)
        if self.has_aux:
            if not isinstance(result, tuple) or len(result) != 2:
                raise TypeError(f"f returned {type(result).__name__}: with aux=True it must return a pair (state, aux)")
            result, self.aux = result
        if versions and list(map(_version, read)) != versions:
            raise RuntimeError(
                "f modifies its input in place, which the solver needs afterwards: write z = z.add(x) instead of "
                "z.add_(x)"
            )
        if self._buffers:
            before, self._buffers = self._buffers, {}
            if before != _versions_of_buffers(self.f):
                raise RuntimeError(
                    "f changes a buffer in every evaluation, in the backward pass too (BatchNorm in training mode?): "
                    "move the layer out of f, use a normalization without state (GroupNorm, LayerNorm), or call "
                    ".eval() on it"
                )
        if k and self._is_tensor and type(result) is Tensor:
            x = read[0]
            if result.dtype is x.dtype and result.shape == x.shape and result.device == x.device:
                return [result]  # the usual case, fast
        return flattened_like(result, read, self._spec)

    def as_in_forward(self) -> Callable[[], contextlib.AbstractContextManager[Any]]:
        """A context for evaluations in the backward pass, which may run outside of that of the solve: with gradients,
        and with the autocast and the attention of the forward pass."""
        return torch.enable_grad if self._contexts() == self._context else self._restored

    @contextlib.contextmanager
    def _restored(self) -> Iterator[None]:
        autocast, attention = self._context
        with contextlib.ExitStack() as stack:
            for kind, (enabled, dtype, caches) in zip(self._kinds, autocast, strict=True):
                stack.enter_context(torch.autocast(kind, dtype, enabled, caches))
            for (_, write), now, then in zip(ATTENTION, self._contexts()[1], attention, strict=True):
                stack.callback(write, now)
                write(then)
            stack.enter_context(torch.enable_grad())
            yield

    def _contexts(self) -> tuple[list[Any], list[bool]]:
        caches = torch.is_autocast_cache_enabled()
        autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), caches) for kind in self._kinds]
        return autocast, [read() for read, _ in ATTENTION]


_cuda: Any = torch.backends.cuda
ATTENTION = [
    (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
]
"""The settings of `torch.nn.attention.sdpa_kernel`: each chooses other bits. Their getters and setters."""


class Random:
    """Replays the random numbers of the first call in all later ones. If the first call does not advance torch's
    default generators, later ones cost nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.draws = device, True
        self._start: list[Tensor] | None = None

    def bound(self, f: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(self, f)

    def __call__(self, f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.draws:
            return f(*args, **kwargs)
        found = _device.generator_states(self._device)
        if self._start is None:
            self._start = found
            result = f(*args, **kwargs)
            self.draws = not all(map(torch.equal, found, _device.generator_states(self._device)))
            return result
        _device.set_generator_states(self._device, self._start)
        try:
            return f(*args, **kwargs)
        finally:
            _device.set_generator_states(self._device, found)


def _versions_of_buffers(f: Any) -> dict[int, int]:
    buffers = (x for module in modules_of(f) for x in module.buffers())
    return {id(x): x._version for x in buffers if not x.is_inference()}


def modules_of(f: Any, depth: int = 3) -> Iterator[nn.Module]:
    """The outermost modules that f obviously uses: itself, its object, what a partial binds or a closure captures."""
    if isinstance(f, nn.Module):
        yield f
        return
    parts: list[Any] = []
    if isinstance(f, types.MethodType):
        parts = [f.__self__, f.__func__]
    elif isinstance(f, functools.partial):
        parts = [f.func, *f.args, *f.keywords.values()]
    elif isinstance(f, types.FunctionType):
        parts = [cell.cell_contents for cell in f.__closure__ or () if cell != types.CellType()]
    for part in parts if depth > 0 else ():
        yield from modules_of(part, depth - 1)
