"""What f's result depends on beside its inputs: the settings it runs under and the random draw it sees."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .. import _device

_cuda: Any = torch.backends.cuda
_cudnn: Any = torch.backends.cudnn
_mkldnn: Any = torch.backends.mkldnn

PATIENCE = 300
"""Seconds that a solve waits for its turn to draw. One evaluation of f takes less, unless it waits for this solve."""

ATTEMPTS = 50
"""How often an evaluation is repeated because another thread drew at the same time."""

Setting = tuple[Callable[[], Any], Callable[[Any], Any]]
"""A function that reads a setting and one that writes it."""


def _attribute(module: Any, name: str) -> Setting:
    return lambda: getattr(module, name), lambda value: setattr(module, name, value)


def _legacy(read: Callable[[], Any], write: Callable[[Any], Any]) -> Setting:
    """One that cannot be read, or has no value, where the settings that replace it were used: None, and left alone."""

    def value() -> Any:
        try:
            return read()
        except RuntimeError:
            return None

    return value, lambda value: None if value is None else write(value)


def _float32_precision() -> list[Setting]:
    """Of matrix products, convolutions and recurrent layers. A setting comes before those that follow it."""
    legacy = [
        _legacy(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        _legacy(*_attribute(_cudnn, "allow_tf32")),
    ]
    backends: Any = torch.backends
    if not hasattr(_cudnn, "conv"):  # before torch 2.9
        return legacy
    modules = [
        backends, _cudnn, _mkldnn,
        _cuda.matmul, _cudnn.conv, _cudnn.rnn,
        _mkldnn.matmul, _mkldnn.conv, _mkldnn.rnn,
    ]  # fmt: skip
    return [*legacy, *(_attribute(module, "fp32_precision") for module in modules)]


GLOBAL_SETTINGS: list[Setting] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    _attribute(_cudnn, "enabled"),
    _attribute(_cudnn, "benchmark"),
    _attribute(_cudnn, "deterministic"),
    _attribute(_mkldnn, "enabled"),
    (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    *_float32_precision(),
]


def _read() -> list[Any]:
    return [read() for read, _ in GLOBAL_SETTINGS]


def _write(values: list[Any]) -> None:
    """In order, and only what is not so yet: one setting may have changed others."""
    for (read, write), value in zip(GLOBAL_SETTINGS, values, strict=True):
        if read() != value:
            write(value)


class Settings:
    """Autocast, the default device and torch's global settings, as they are now, to be restored in the backward pass:
    it may run outside of a context, and on a GPU it runs in another thread."""

    def __init__(self, device: torch.device) -> None:
        self._values = _read()
        self._default_device = _default_device()
        self._autocast = [_autocast(kind) for kind in sorted({"cpu", device.type})]

    @property
    def autocasts(self) -> bool:
        return any(settings["enabled"] for settings in self._autocast)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        now = _read()
        with contextlib.ExitStack() as stack:
            if now != self._values:
                stack.callback(_write, now)
                _write(self._values)
            if self._default_device != _default_device():
                stack.enter_context(self._default_device)
            stack.enter_context(autocast_as(self._autocast))
            yield

    def as_they_are_not_now(self) -> "Settings | None":
        """These, if any of them is another one now."""
        same = (
            _read() == self._values
            and _default_device() == self._default_device
            and [_autocast(settings["device_type"]) for settings in self._autocast] == self._autocast
        )
        return None if same else self


@contextlib.contextmanager
def autocast_as(wanted: list[dict[str, Any]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for settings in wanted:
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


ANOTHER_THREAD = (
    "another thread draws from torch's default generator while f does, so that f does not draw the same random numbers "
    "in every evaluation, which it has to: let that thread have a torch.Generator of its own, or call .eval() on the "
    "layers of f that drop out"
)

CANNOT_REPEAT = (
    "f draws random numbers ({name}) while a graph is recorded, and a draw of this device cannot be repeated there, "
    "which the backward pass has to: call .eval() on the layers of f that drop out, or solve outside of the graph"
)


class OnceMore(Exception):
    """An evaluation is to be repeated: another thread may have drawn at the same time."""


class Draw:
    """One random draw, seen by every evaluation of f in a solve and in its backward pass.

    It is entered around each evaluation. A first one that leaves the generators as they were draws nothing, and the
    others pay nothing.

    All threads share the default generators. Evaluations that draw take turns, a thread at a time. Of a first one it is
    not known whether it draws: first ones run beside each other, since they may wait for each other (with a barrier, a
    collective), and are repeated if what they drew was perhaps another's.

    Threads that do not solve may draw at any time. Where any live, an evaluation that leaves the generators elsewhere
    than the one before is repeated until two in succession agree.
    """

    _turns: ClassVar = threading.Condition()
    _drawing: ClassVar[list[tuple["Draw", int]]] = []  # evaluations that draw, and their thread
    _first: ClassVar[list[tuple["Draw", int]]] = []  # first evaluations

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.draws: bool | None = None  # not known before the first evaluation
        self._start: list[Tensor | None] = []
        self._end: list[Tensor | None] | None = None  # where the last evaluation that counts left the generators
        self._tried: list[Tensor | None] | None = None  # and one that does not
        self._attempts, self._beside_others = 0, False
        self._watch: _Watch | None = None
        # A solve within f belongs to the evaluation of f around it, also when its backward pass has another thread.
        me = threading.get_ident()
        around = [draw for draw, thread in (*self._first, *self._drawing) if thread == me]
        self._around: set[Draw] = {*around, *(outer for draw in around for outer in draw._around)}

    def __enter__(self) -> None:
        if self.draws is False:
            return
        me = self, threading.get_ident()
        with self._turns:
            if self.draws is None:
                self._wait_for(lambda: not self._others(self._drawing))
                others = self._others(self._first)
                for draw in others:
                    draw._beside_others = True
                self._beside_others = bool(others)
                self._first.append(me)
                self._start = _device.generator_states(self._device)
                if any(state is None for state in self._start):
                    self._watch = _Watch()
            else:
                self._wait_for(self._has_turn)
                self._drawing.append(me)
                _device.set_generator_states(self._device, self._start)
        if self._watch is not None:
            self._watch.__enter__()

    def __exit__(self, kind: object, *exception: object) -> None:
        if self.draws is False:
            return
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.__exit__(None, None, None)
        me = self, threading.get_ident()
        with self._turns:
            (self._first if self.draws is None else self._drawing).remove(me)
            self._turns.notify_all()
            if kind is not None:  # as if f had not been called
                _device.set_generator_states(self._device, self._start)
            elif self.draws is None:
                self._decide(watch, _device.generator_states(self._device))
            elif self._others_may_draw():
                self._compare(_device.generator_states(self._device))

    def _decide(self, watch: "_Watch | None", end: list[Tensor | None]) -> None:
        """After a first evaluation: whether f draws."""
        if watch is not None and watch.drew and any(state is None for state in self._start):
            raise RuntimeError(CANNOT_REPEAT.format(name=watch.drew))
        self.draws, self._end = not _equal(self._start, end), end
        if self.draws and self._beside_others:
            raise OnceMore

    def _compare(self, end: list[Tensor | None]) -> None:
        """After an evaluation that draws: whether it was f alone that moved the generators."""
        counts = self._end is not None and _equal(self._end, end)
        again = self._tried is not None and _equal(self._tried, end)  # f may draw another number in every evaluation
        if counts or again:
            self._end, self._tried, self._attempts = end, None, 0
            return
        self._tried, self._attempts = end, self._attempts + 1
        if self._attempts > ATTEMPTS:
            raise RuntimeError(ANOTHER_THREAD)
        raise OnceMore

    def _others_may_draw(self) -> bool:
        """Threads that do not solve. While a graph is recorded, nothing can be compared."""
        return threading.active_count() > 1 and not _device.is_capturing(self._device)

    def _wait_for(self, turn: Callable[[], bool]) -> None:
        if not self._turns.wait_for(turn, timeout=PATIENCE):
            raise RuntimeError(
                f"a solve has waited {PATIENCE} s for its turn to draw random numbers, behind an evaluation of f in "
                "another thread that has not ended: does that f wait for a solve in a thread of its own? Call it in "
                "the thread of f, or let f draw nothing"
            )

    def _others(self, evaluations: list[tuple["Draw", int]]) -> list["Draw"]:
        """Those that this one is not within."""
        me = threading.get_ident()
        return [draw for draw, thread in evaluations if thread != me and draw not in self._around]

    def _has_turn(self) -> bool:
        """Within a first evaluation nothing is disturbed for good: that one will be repeated."""
        within = len(self._others(self._first)) < len(self._first)
        return not self._others(self._drawing) and (within or not self._first)

    @contextlib.contextmanager
    def rewound(self) -> Iterator[None]:
        """Around a backward pass: the generators end where they were."""
        if not self.draws:
            yield
            return
        now = _device.generator_states(self._device)
        try:
            yield
        finally:
            _device.set_generator_states(self._device, now)

    @classmethod
    def _start_anew(cls) -> None:
        """In a process that was forked, where no other thread is."""
        me = threading.get_ident()
        cls._turns = threading.Condition()
        for evaluations in (cls._drawing, cls._first):
            evaluations[:] = [(draw, thread) for draw, thread in evaluations if thread == me]


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=Draw._start_anew)


def _same(x: Tensor, y: Tensor) -> bool:
    return bool(torch.isclose(x.detach(), y.detach(), rtol=0, atol=0, equal_nan=True).all())


def _equal(before: list[Tensor | None], after: list[Tensor | None]) -> bool:
    rows = zip(before, after, strict=False)  # f may be the first to use a GPU
    return all(a is None or b is None or torch.equal(a, b) for a, b in rows)


class _Watch(TorchDispatchMode):
    """Notices whether what runs within draws: `drew` is the name of the first operation that does."""

    drew: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and _is_active(func, args, kwargs or {}):
            self.drew = self.drew or func.overloadpacket.__name__
        return func(*args, **(kwargs or {}))


def _is_active(func: Any, args: Any, kwargs: Any) -> bool:
    """Attention and recurrent layers draw only if they drop out."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return all(given.get(name, 1) for name in ("dropout_p", "dropout", "p", "train"))


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Not to be compiled where a compiled function calls it. Here, torch.compiler.disable would import the compiler,
    which takes two seconds."""
    return lambda *args: torch.compiler.disable(function)(*args)
