"""f(z, *args), called the same way every time.

The backward pass evaluates f again, and its gradient is exact only if f returns the same. As torch.utils.checkpoint,
this rewinds torch's default generators and restores autocast; f with dropout has one mask, and so a fixed point.
"""

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from .state import State, flattened_like, structured

version = attrgetter("_version")


class _Thread(threading.local):
    """evaluates: whether this thread is inside of an evaluation, to which all tensors belong: a solve is unrolled."""

    evaluates = False


thread = _Thread()


class Repeatable:
    """f with a state given as a flat list of tensors.

    aux: the auxiliary output of the last evaluation, if f has any. draws: whether f uses torch's default generators,
    which the first evaluation shows. differentiates: whether f computes derivatives itself. spreads: whether it
    saves tensors on another device than that of the state. autocasts: whether under autocast.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        initial: State,
        spec: TreeSpec,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        indexed: bool = False,
        has_aux: bool = False,
        is_traced: bool = False,
    ) -> None:
        self.f, self._spec, self.args, self._kwargs = f, spec, args, dict(kwargs or {})
        self._indexed, self._has_aux, self.aux = indexed, has_aux, None
        x, self._is_tensor = initial[0], spec.is_leaf()
        self._device, self._is_cuda = x.device, x.is_cuda
        self._has_versions = not torch.is_inference_mode_enabled()
        self._is_single = self._has_versions and self._is_tensor
        self._usual = (x.dtype, x.shape, x.device, torch.strided) if self._is_tensor and not is_traced else None
        self.draws, self.differentiates, self._is_new, self._is_simple = False, False, not is_traced, is_traced
        self.spreads = False
        self._random: Sequence[tuple[Any, Tensor]] = ()
        self._autocast, self._attention = _autocast(x.device), _attention()
        self.autocasts = any(enabled for _, _, enabled, _ in self._autocast)
        modules = [module for outer in modules_of(f) for module in outer.modules()]
        self._buffers = [m._buffers for m in modules if m._buffers]
        self._tensors = [(t, dict(t)) for m in modules for t in (m._parameters, m._buffers) if t]

    def __call__(self, read: State, k: int) -> State:
        """Evaluation k."""
        if self._indexed:
            self._kwargs["evaluation"] = k
        z = read[0] if self._is_tensor else structured(read, self._spec)
        versions = z._version if self._is_single else self._versions(read)
        around, thread.evaluates = thread.evaluates, torch.is_grad_enabled()
        try:
            result = self.f(z, *self.args, **self._kwargs) if self._is_simple else self._carefully(z)
        finally:
            thread.evaluates = around
        if self._has_aux:
            if not isinstance(result, tuple) or len(result) != 2:
                raise TypeError(f"f returned {type(result).__name__}: with aux=True it must return a pair (state, aux)")
            result, self.aux = result
        if (z._version if self._is_single else self._versions(read)) != versions:
            raise RuntimeError("f modifies its input in place, and the solver needs it: write z = z + x, not z += x")
        is_plain = k and type(result) is Tensor and not result._is_zerotensor()
        if is_plain and (result.dtype, result.shape, result.device, result.layout) == self._usual:
            return [result]  # the usual case, fast
        return flattened_like(result, read, self._spec)

    def _versions(self, read: State) -> int:
        return sum(map(version, read)) if self._has_versions else 0

    def _carefully(self, z: Any) -> Any:
        """An evaluation that is the first, draws random numbers, or runs on a GPU."""
        if self._is_new:
            return self._first(z)
        return self._replayed(z) if self.draws else self._called(z)

    def _called(self, z: Any) -> Any:
        if self._is_cuda and torch.backends.cudnn.benchmark:  # might choose another algorithm next time
            with torch.backends.cudnn.flags(benchmark=False):
                return self.f(z, *self.args, **self._kwargs)
        return self.f(z, *self.args, **self._kwargs)

    def _first(self, z: Any) -> Any:
        """The first evaluation shows whether f draws random numbers, and whether it can be repeated at all."""
        self._is_new, self._random = False, generator_states(self._device)
        buffers = [x for table in self._buffers for x in table.values() if x is not None and not x.is_inference()]
        versions = list(map(version, buffers))
        result = self._called(z)
        if versions != list(map(version, buffers)):
            raise RuntimeError(
                "f changes a buffer in every evaluation (BatchNorm in training mode?): move the layer out of f, use a "
                "normalization without state (GroupNorm, LayerNorm), or call .eval() on it"
            )
        self.draws = not all(torch.equal(state, generator.get_state()) for generator, state in self._random)
        self._is_simple = not (self.draws or self._is_cuda)
        return result

    def _replayed(self, z: Any) -> Any:
        """An evaluation with the random numbers of the first one."""
        found = [(generator, generator.get_state()) for generator, _ in self._random]
        set_generator_states(self._random)
        try:
            return self._called(z)
        finally:
            set_generator_states(found)

    # In the backward pass

    def as_in_forward(self) -> Callable[[], contextlib.AbstractContextManager[Any]]:
        """A context for evaluations in the backward pass, which may run outside of that of the solve: with gradients,
        and with the autocast, the attention and the modules' tensors of the forward pass."""
        now = _autocast(self._device), _attention()
        if self.autocasts or now != (self._autocast, self._attention) or self._replaced():
            return self._restored
        usual = torch.enable_grad()  # which may be entered again, unlike the other
        return lambda: usual

    @contextlib.contextmanager
    def _restored(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for table, name, x in self._replaced():
                stack.callback(table.__setitem__, name, table[name])
                table[name] = x
            for setting in self._autocast:
                stack.enter_context(torch.autocast(*setting))
            for (_, write), now, then in zip(ATTENTION, _attention(), self._attention, strict=True):
                stack.callback(write, now)
                write(then)
            stack.callback(torch.clear_autocast_cache)  # an outer autocast would keep every evaluation's casts
            stack.enter_context(torch.enable_grad())
            yield

    def _replaced(self) -> list[tuple[dict[str, Any], str, Any]]:
        """The modules' tensors that are others now, as after `torch.func.functional_call`. FSDP exchanges its own."""
        pairs = [(table, name, x) for table, before in self._tensors for name, x in before.items()]
        return [
            (table, name, x)
            for table, name, x in pairs
            if table.get(name) is not x and not (hasattr(x, "device_mesh") or hasattr(table[name], "device_mesh"))
        ]


def _autocast(device: torch.device) -> list[tuple[str, torch.dtype, bool, bool]]:
    """The arguments of torch.autocast for what is set now, on the CPU and this device."""
    caches = torch.is_autocast_cache_enabled()
    return [
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), caches)
        for kind in dict.fromkeys(("cpu", device.type))
    ]


_cuda: Any = torch.backends.cuda
ATTENTION = [
    (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
]
"""The settings of `torch.nn.attention.sdpa_kernel`: each chooses other bits. Their getters and setters."""


def _attention() -> list[bool]:
    return [read() for read, _ in ATTENTION]


def generator_states(device: torch.device) -> list[tuple[Any, Tensor]]:
    """torch's default generators, of the CPU, of the device and of all GPUs in use, because f may use them; each with
    its state."""
    used = [m for m in (torch.cuda, torch.xpu) if m.is_initialized()]
    if device.type not in ("cpu", "cuda", "xpu"):
        used.append(getattr(torch, device.type))
    return [(g, g.get_state()) for g in (torch.default_generator, *(g for m in used for g in m.default_generators))]


def set_generator_states(states: Sequence[tuple[Any, Tensor]]) -> None:
    """Restore states."""
    for generator, state in states:
        generator.set_state(state)


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
