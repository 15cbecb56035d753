"""What f's result depends on beside its inputs: the settings it runs under and the random draw it sees."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

_cuda, _cudnn, _mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn


def _attribute(module: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    return lambda: getattr(module, name), lambda value: setattr(module, name, value)


GLOBAL_SETTINGS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    _attribute(_cudnn, "enabled"),
    _attribute(_cudnn, "benchmark"),
    _attribute(_cudnn, "deterministic"),
    _attribute(_mkldnn, "enabled"),
    (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
]
"""Pairs of a function that reads a setting and one that writes it."""


class Settings:
    """Autocast, the default device and torch's global settings, as they are now, to be restored in the backward pass:
    it may run outside of a context, and on a GPU it runs in another thread."""

    def __init__(self, device: torch.device) -> None:
        self._values = [read() for read, _ in GLOBAL_SETTINGS]
        self._default_device = _default_device()
        self._autocast = [_autocast(kind) for kind in sorted({"cpu", device.type})]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        now = [read() for read, _ in GLOBAL_SETTINGS]
        changed = [i for i, value in enumerate(self._values) if value != now[i]]
        with contextlib.ExitStack() as stack:
            for i in changed:
                _, write = GLOBAL_SETTINGS[i]
                stack.callback(write, now[i])
                write(self._values[i])
            if self._default_device != _default_device():
                stack.enter_context(self._default_device)
            for settings in self._autocast:
                if settings != _autocast(settings["device_type"]):
                    stack.enter_context(torch.autocast(**settings))
            yield


def _default_device() -> torch.device:
    return torch.empty(0).device  # torch.get_default_device() knew nothing of `with torch.device(...)` in torch 2.6


def _autocast(device_type: str) -> dict[str, Any]:
    return {
        "device_type": device_type,
        "enabled": torch.is_autocast_enabled(device_type),
        "dtype": torch.get_autocast_dtype(device_type),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }


class Draw:
    """One random draw, seen by every evaluation of f in a solve and in its backward pass.

    It is entered around each evaluation. A first one that leaves the generators as they were draws nothing,
    and the others pay nothing.
    """

    _turn = threading.RLock()  # the default generators are shared by all threads

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start: list[Tensor] = []
        self._draws: bool | None = None  # not known before the first evaluation

    def __enter__(self) -> None:
        if self._draws is False:
            return
        self._turn.acquire()
        if self._draws:
            _set_generator_states(self._device, self._start)
        else:
            self._start = _generator_states(self._device)

    def __exit__(self, kind: object, *exception: object) -> None:
        if self._draws is False:
            return
        try:
            if kind is not None:  # as if f had not been called
                _set_generator_states(self._device, self._start)
            elif self._draws is None:
                now = _generator_states(self._device)
                self._draws = not all(map(torch.equal, self._start, now))
        finally:
            self._turn.release()

    @contextlib.contextmanager
    def rewound(self) -> Iterator[None]:
        """Around a backward pass: the generators end where they were."""
        if not self._draws:
            yield
            return
        now = _generator_states(self._device)
        try:
            yield
        finally:
            _set_generator_states(self._device, now)


def _generator_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        states.append(torch.cuda.get_rng_state(device))
    elif device.type == "xpu":
        states.append(torch.xpu.get_rng_state(device))
    return states


def _set_generator_states(device: torch.device, states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        getattr(torch, device.type).set_rng_state(state, device)
