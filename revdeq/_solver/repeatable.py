"""f(z, *args), called the same way every time.

The backward pass evaluates f again, and its gradient is exact only if f returns the same. As torch.utils.checkpoint,
this rewinds torch's default generators and restores autocast; f with dropout has one mask, and so a fixed point.
"""

import contextlib
import functools
import inspect
import threading
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


class _Thread(threading.local):
    """evaluates: whether this thread is inside of an evaluation. A solve there is unrolled: its tensors belong to it."""

    evaluates = False


thread = _Thread()


class Repeatable:
    """f with a state given as a flat list of tensors.

    aux: the auxiliary output of the last evaluation, if f has any. draws: whether f uses torch's default generators,
    which the first evaluation shows. differentiates: whether f computes derivatives itself. autocasts: whether under
    autocast.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        initial: State,
        spec: TreeSpec,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        indexed: bool,
        has_aux: bool,
        is_traced: bool = False,
    ) -> None:
        self.f, self._spec, self.args, self._kwargs = f, spec, args, dict(kwargs)
        self._indexed, self._has_aux, self.aux = indexed, has_aux, None
        x, self._is_tensor = initial[0], spec.is_leaf()
        self._device, self._is_cuda, self._has_versions = x.device, x.is_cuda, not torch.is_inference_mode_enabled()
        self._usual = (x.dtype, x.shape, x.device, torch.strided) if self._is_tensor and not is_traced else None
        self.draws, self.differentiates = False, False
        self._is_new, self._random = not is_traced, []
        self._kinds = ("cpu",) if x.is_cpu else ("cpu", x.device.type)
        self._context = self._contexts()
        self.autocasts = any(enabled for enabled, _, _ in self._context[0])
        modules = [module for outer in modules_of(f) for module in outer.modules()]
        self._buffers = [m._buffers for m in modules if m._buffers]
        self._tensors = [(t, name, x) for m in modules for t in (m._parameters, m._buffers) for name, x in t.items()]

    def __call__(self, read: State, k: int) -> State:
        """Evaluation k."""
        if self._indexed:
            self._kwargs["evaluation"] = k
        z = read[0] if self._is_tensor else structured(read, self._spec)
        versions = sum(map(_version, read)) if self._has_versions else 0
        around, thread.evaluates = thread.evaluates, True
        try:
            if self._is_new:
                result = self._first(z)
            else:
                result = self._replayed(z) if self.draws else self._called(z)
        finally:
            thread.evaluates = around
        if self._has_aux:
            if not isinstance(result, tuple) or len(result) != 2:
                raise TypeError(f"f returned {type(result).__name__}: with aux=True it must return a pair (state, aux)")
            result, self.aux = result
        if self._has_versions and sum(map(_version, read)) != versions:
            raise RuntimeError(
                "f modifies its input in place, which the solver needs afterwards: write z = z.add(x) instead of "
                "z.add_(x)"
            )
        if type(result) is Tensor and (result.dtype, result.shape, result.device, result.layout) == self._usual:
            if not result._is_zerotensor():
                return [result]
        return flattened_like(result, read, self._spec)

    def _called(self, z: Any) -> Any:
        if self._is_cuda and torch.backends.cudnn.benchmark:  # might choose another algorithm next time
            with torch.backends.cudnn.flags(benchmark=False):
                return self.f(z, *self.args, **self._kwargs)
        return self.f(z, *self.args, **self._kwargs)

    def _first(self, z: Any) -> Any:
        """The first evaluation shows whether f draws random numbers, and whether it can be repeated at all."""
        self._is_new, self._random = False, _device.generator_states(self._device)
        versions = self._versions_of_buffers()
        try:
            result = self._called(z)
        except TypeError as error:
            raise self._explained(error) from None
        if versions and versions != self._versions_of_buffers():
            raise RuntimeError(
                "f changes a buffer in every evaluation, in the backward pass too (BatchNorm in training mode?): move "
                "the layer out of f, use a normalization without state (GroupNorm, LayerNorm), or call .eval() on it"
            )
        self.draws = not all(map(torch.equal, self._random, _device.generator_states(self._device)))
        return result

    def _replayed(self, z: Any) -> Any:
        """An evaluation with the random numbers of the first one."""
        found = _device.generator_states(self._device)
        _device.set_generator_states(self._device, self._random)
        try:
            return self._called(z)
        finally:
            _device.set_generator_states(self._device, found)

    def _explained(self, error: TypeError) -> TypeError:
        """A better message than "takes 2 positional arguments but 3 were given", if that is the problem."""
        function = self.f.forward if isinstance(self.f, nn.Module) else self.f
        names = ["z", *(["x"] if len(self.args) == 1 else [f"args[{i}]" for i in range(len(self.args))])]
        try:
            inspect.signature(function).bind(*names, **self._kwargs)
        except ValueError:  # it has no signature
            return error
        except TypeError:
            called = ", ".join([*names, *(f"{name}=..." for name in self._kwargs)])
            return TypeError(f"f is called as f({called}), but it does not take these arguments: {error}")
        return error

    def _versions_of_buffers(self) -> list[int]:
        buffers = [x for table in self._buffers for x in table.values() if x is not None]
        return [x._version for x in buffers if not x.is_inference()]

    # In the backward pass

    def as_in_forward(self) -> Callable[[], contextlib.AbstractContextManager[Any]]:
        """A context for evaluations in the backward pass, which may run outside of that of the solve: with gradients,
        and with the autocast, the attention and the modules' tensors of the forward pass."""
        if self.autocasts or self._contexts() != self._context or self._replaced():
            return self._restored
        return torch.enable_grad

    @contextlib.contextmanager
    def _restored(self) -> Iterator[None]:
        autocast, attention = self._context
        with contextlib.ExitStack() as stack:
            for table, name, x in self._replaced():
                stack.callback(table.__setitem__, name, table[name])
                table[name] = x
            for kind, (enabled, dtype, caches) in zip(self._kinds, autocast, strict=True):
                stack.enter_context(torch.autocast(kind, dtype, enabled, caches))
            for (_, write), now, then in zip(ATTENTION, self._contexts()[1], attention, strict=True):
                stack.callback(write, now)
                write(then)
            stack.callback(
                torch.clear_autocast_cache
            )  # inside an outer autocast, it would keep every evaluation's casts
            stack.enter_context(torch.enable_grad())
            yield

    def _replaced(self) -> list[tuple[dict[str, Any], str, Any]]:
        """The modules' tensors that are others now, as after `torch.func.functional_call`. FSDP exchanges its own."""
        replaced = [given for given in self._tensors if given[0].get(given[1]) is not given[2]]
        return [
            (t, name, x)
            for t, name, x in replaced
            if not hasattr(x, "device_mesh") and not hasattr(t[name], "device_mesh")
        ]

    def _contexts(self) -> tuple[list[Any], list[bool]]:
        caches = torch.is_autocast_cache_enabled()
        autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), caches) for kind in self._kinds]
        return autocast, [read() for read, _ in ATTENTION]


_cuda: Any = torch.backends.cuda
ATTENTION = [
    (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
]
"""The settings of `torch.nn.attention.sdpa_kernel`: each chooses other bits. Their getters and setters."""


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
