"""The context of f: torch's settings and the random numbers that it draws."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .. import _device
from .unchanged import is_compiled

_cuda: Any = torch.backends.cuda
_cudnn: Any = torch.backends.cudnn
_mkldnn: Any = torch.backends.mkldnn

PATIENCE = 300
"""Timeout for the generator lock, in seconds. An evaluation of f takes less, unless it waits for this solve."""

ATTEMPTS = 50
"""How often an evaluation is repeated because another thread used the generators at the same time."""

PAUSE = 1.0
"""How long a solve waits for the first evaluations of others, in seconds. They may take long, or wait for it."""

Setting = tuple[Callable[[], Any], Callable[[Any], Any]]
"""The getter and the setter of a setting."""


def _attribute(module: Any, name: str) -> Setting:
    return lambda: getattr(module, name), lambda value: setattr(module, name, value)


def _legacy(read: Callable[[], Any], write: Callable[[Any], Any]) -> Setting:
    """A deprecated setting cannot be read if its replacements were used: None, and it is not written."""

    def value() -> Any:
        try:
            return read()
        except RuntimeError:
            return None

    return value, lambda value: None if value is None else write(value)


CPU_SETTINGS: list[Setting] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    _attribute(_mkldnn, "enabled"),
    (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    _legacy(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    # general ones first
    *[_attribute(x, "fp32_precision") for x in (torch.backends, _mkldnn, _mkldnn.matmul, _mkldnn.conv, _mkldnn.rnn)],
]

GPU_SETTINGS: list[Setting] = [
    _attribute(_cudnn, "enabled"),
    _attribute(_cudnn, "deterministic"),
    (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    _legacy(*_attribute(_cudnn, "allow_tf32")),
    *[_attribute(x, "fp32_precision") for x in (_cudnn, _cuda.matmul, _cudnn.conv, _cudnn.rnn)],
]


def _read(settings: list[Setting]) -> list[Any]:
    return [read() for read, _ in settings]


def _write(settings: list[Setting], values: list[Any]) -> None:
    """Write settings in order, and only those that differ, since one setting may change others."""
    for (read, write), value in zip(settings, values, strict=True):
        if read() != value:
            write(value)


class Settings:
    """The current autocast, default device and global settings of torch, to restore in the backward pass, which may run
    outside of their context, and on a GPU runs in another thread."""

    def __init__(self, device: torch.device) -> None:
        in_use = device.type != "cpu" or _device.used_gpus()
        self._settings = CPU_SETTINGS + GPU_SETTINGS if in_use else CPU_SETTINGS
        self._values = _read(self._settings)
        self._default_device = _default_device()
        self._autocast = [_autocast(kind) for kind in sorted({"cpu", device.type})]

    @property
    def key(self) -> str:
        """Differs if a setting differs."""
        return repr((self._values, self._default_device, self._autocast))

    @property
    def autocasts(self) -> bool:
        return any(settings["enabled"] for settings in self._autocast)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        now = _read(self._settings)
        with contextlib.ExitStack() as stack:
            if now != self._values:
                stack.callback(_write, self._settings, now)
                _write(self._settings, self._values)
            if self._default_device != _default_device():
                stack.enter_context(self._default_device)
            for settings in self._autocast:
                if settings != _autocast(settings["device_type"]):
                    stack.enter_context(torch.autocast(**settings))
            yield

    def unless_current(self) -> "Settings | None":
        """These settings, or None if they are the current ones."""
        same = (
            _read(self._settings) == self._values
            and _default_device() == self._default_device
            and [_autocast(settings["device_type"]) for settings in self._autocast] == self._autocast
        )
        return None if same else self


class WithoutBenchmark:
    """Context manager around evaluations of f: cuDNN's algorithms are not chosen by trying them. Each thread keeps what
    it found, and the backward pass of a GPU has a separate thread, so that f could compute other bits there."""

    __slots__ = ("_was",)

    def __enter__(self) -> None:
        self._was = _cudnn.benchmark
        if self._was:
            _cudnn.benchmark = False

    def __exit__(self, *exception: object) -> None:
        if self._was:
            _cudnn.benchmark = True


def _default_device() -> torch.device:
    return torch.empty(0).device  # includes `with torch.device(...)`


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


class OnceMore(Exception):
    """The evaluation must be repeated: another thread used the generators at the same time."""


class FromTheStart(OnceMore):
    """The whole solve must be repeated, because that was its first evaluation."""


class Draw:
    """Replays the random numbers of the first evaluation of f in all evaluations of a solve and its backward pass.

    Called with f and its arguments, it calls f. If the first evaluation does not advance the generators, f draws
    nothing, and the others cost nothing. Otherwise every evaluation starts from the generator states of the first one,
    and restores the generators afterwards.

    All threads share the default generators. A lock lets one solve at a time draw, but a thread that does not solve may
    draw at any time. If there are other threads, it is unclear whether f advanced the generators: the second evaluation
    is watched for operations that draw, and an evaluation after which the generators differ from the one before is
    repeated until two in succession agree. To agree by chance, both would have to be disturbed equally, as by the first
    evaluation of another solve, which does not take the lock: a solve waits for its end before it repeats its own.

    Generators are rewound before f is called, not when it draws: a checkpoint, or a solve inside f, reads them before.
    If f draws nothing, another thread may therefore get numbers twice, in the second evaluation only.
    """

    turn: ClassVar = threading.Lock()  # acquired in C, so that Ctrl-C cannot interrupt it halfway
    _turns: ClassVar = 0  # counts acquisitions
    _beside: ClassVar[set["Draw"]] = set()  # those in a first evaluation, without the lock

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.draws: bool | None = None  # unknown before the first evaluation
        self._start: list[Tensor] = []
        self._end: list[Tensor] = []  # the generators after the last accepted evaluation
        self._tried: list[Tensor] | None = None  # and after the last rejected one
        self._attempts, self._is_in_doubt, self._was_beside_a_turn = 0, False, False
        self._deadline: float | None = None
        # A solve inside an f that holds the lock shares it, even if its backward pass runs in another thread.
        self._has_turn = _thread.draws

    def __call__(self, f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.draws is None and not self._was_beside_a_turn:
            return self._beside_others(f, *args, **kwargs)
        run = self._first if self.draws is None else self._again
        if self._has_turn or _thread.draws:
            return run(f, *args, **kwargs)
        if self._is_in_doubt or self._tried is not None:
            self._wait_for_others()
        with self._turn():
            Draw._turns += 1
            _thread.turns += 1
            _thread.draws = True
            try:
                return run(f, *args, **kwargs)
            finally:
                _thread.draws = False

    def _beside_others(self, f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The first evaluation runs without the lock, because several threads may wait for each other (at a barrier, in
        a collective). If another thread held the lock meanwhile, and so changed the generators, it is repeated."""
        if self._has_turn:
            return self._first(f, *args, **kwargs)
        turns, is_taken = self._turns - _thread.turns, self.turn.locked()
        try:
            self._beside.add(self)
            result = self._first(f, *args, **kwargs)
        finally:
            self._beside.discard(self)
        if is_taken or self._turns - _thread.turns > turns:
            self.draws, self._was_beside_a_turn = None, True
            raise OnceMore
        return result

    def _first(self, f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._start = _device.generator_states(self._device)
        try:
            result = f(*args, **kwargs)
        except BaseException:  # as if f had not been called
            _device.set_generator_states(self._device, self._start)
            raise
        self._end = _device.generator_states(self._device)
        self.draws = not _equal(self._start, self._end)
        self._is_in_doubt = self.draws and self._others_may_draw()
        return result

    def _again(self, f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_beside, found = bool(self._beside), _device.generator_states(self._device)
        watches = self._is_in_doubt and not is_compiled(f)  # under a dispatch mode, f would be compiled again
        seen: list[bool] = []
        _device.set_generator_states(self._device, self._start)
        try:
            with _Watch(lambda: seen.append(True)) if watches else _NOTHING:
                result = f(*args, **kwargs)
            if watches and not seen:
                self.draws, self._tried = False, None
            elif self._others_may_draw():
                self._compare(_device.generator_states(self._device), is_beside or bool(self._beside))
            self._is_in_doubt = False
            return result
        finally:
            _device.set_generator_states(self._device, found)

    def _compare(self, end: list[Tensor], is_beside: bool) -> None:
        """Whether only f advanced the generators."""
        is_chance = is_beside and self._deadline is not None and time.monotonic() < self._deadline  # that they agree
        if _equal(self._end, end) and not (self._is_in_doubt and is_chance):
            self._tried, self._attempts = None, 0
            return
        # f may draw more or fewer numbers than before
        if self._tried is not None and _equal(self._tried, end) and not is_chance:
            self._end, self._tried, self._attempts = end, None, 0
            if self._is_in_doubt:
                self._is_in_doubt = False
                raise FromTheStart
            return
        self._tried, self._attempts = end, self._attempts + 1
        if self._attempts > ATTEMPTS:
            raise RuntimeError(ANOTHER_THREAD)
        raise OnceMore

    def _wait_for_others(self) -> None:
        """Until no other solve is in its first evaluation."""
        if self._deadline is None:
            self._deadline = time.monotonic() + PAUSE
        while self._beside and time.monotonic() < self._deadline:
            time.sleep(1e-4)

    def _others_may_draw(self) -> bool:
        """Whether there are other threads. During graph capture nothing can be compared."""
        return threading.active_count() > 1 and not _device.is_capturing(self._device)

    @classmethod
    def _turn(cls) -> Any:
        if cls.turn.locked():
            if not cls.turn.acquire(timeout=PATIENCE):
                raise RuntimeError(
                    f"timeout after {PATIENCE} s: an evaluation of f in another thread holds the lock on the random "
                    "generators. Does that f wait for a solve in a thread of its own? Call the solve in the thread of "
                    "f, or draw no random numbers in f"
                )
            cls.turn.release()
        return cls.turn

    @classmethod
    def _start_anew(cls) -> None:
        """In a forked process: a thread that held the lock may not exist."""
        cls.turn, cls._beside = threading.Lock(), set()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=Draw._start_anew)

_NOTHING = contextlib.nullcontext()


class _Thread(threading.local):
    """draws: whether this thread is inside an evaluation that holds the lock. turns: how often it has held it."""

    draws = False
    turns = 0


_thread = _Thread()


def _equal(before: list[Tensor], after: list[Tensor]) -> bool:
    return all(map(torch.equal, before, after))  # f may be the first to use a GPU


class _Watch(TorchDispatchMode):
    """A dispatch mode that calls a function before the first operation that draws from a default generator."""

    supports_higher_order_operators = True

    def __init__(self, before_a_draw: Callable[[], None]) -> None:
        super().__init__()
        self._before_a_draw: Callable[[], None] | None = before_a_draw

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self._before_a_draw
        if before is not None and _draws(func, args, kwargs or {}):
            self._before_a_draw = None
            before()
        return func(*args, **(kwargs or {}))


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Attention and recurrent layers draw only with dropout; operations with an explicit generator do not count."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    drops_out = all(given.get(name, 1) for name in ("dropout_p", "dropout", "p", "train"))
    return drops_out and given.get("generator") is None


def undrawn(f: Callable[..., Any]) -> Callable[..., Any]:
    """f for a tracer, which would record different random numbers for every evaluation: raises if f draws. Under
    TorchDynamo, in a strict torch.export, this is known from modules instead of operations."""
    if torch.compiler.is_dynamo_compiling():
        for module in f.modules() if isinstance(f, nn.Module) else ():
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
                _refuse_draws()
        return f

    def watched(*args: Any, **kwargs: Any) -> Any:
        with _Watch(_refuse_draws):
            return f(*args, **kwargs)

    return watched


def _refuse_draws() -> None:
    raise RuntimeError(
        "f draws random numbers (dropout in training mode?), and a traced or exported solve would draw different ones "
        "in every evaluation: call .eval() on the model first"
    )


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Like torch.compiler.disable, which would import the compiler here and take two seconds."""
    return lambda *args: torch.compiler.disable(function)(*args)
