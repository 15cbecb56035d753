"""The host side of a GPU, simulated: a device implemented in Python, whose tensors store their data on the CPU.

    from fake_gpu import DEVICE, driver, emulated
    x = torch.randn(3, 6, device=DEVICE)        # "fakegpu:0", while fakegpu:1 is current
    with emulated():                            # its Triton launches go to the PTX emulator
        revdeq.solve(f, x)
    driver.waits                                # what made the host wait for the device

As on a GPU, PyTorch runs backward passes in a separate thread for the device. Reading a value on the host synchronises,
which is recorded. A non-blocking copy to the host arrives when its stream is told to run. During graph capture,
synchronising is an error, in every thread. A graph is a list of the operations and launches that ran during capture,
with their memory; a replay runs them again. The device has its own random number generator. Tensors of two devices
cannot be mixed. The other device is current, so that code that relies on the current device fails.

It cannot show races: operations run immediately and in order. PyTorch gives a Python device one thread only: fakegpu:0
alone has backward passes, if this module is imported before the first backward pass of the process.
"""

import contextlib
import functools
import threading
import types
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

try:
    from torch.utils.backend_registration import (
        _DummyBackendModule,
        _setup_privateuseone_for_python_backend,
    )
except ImportError:
    pytest.skip(f"torch {torch.__version__} does not support devices implemented in Python", allow_module_level=True)

aten = torch.ops.aten
NAME = "fakegpu"
READS = {aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten.nonzero, aten.masked_select, aten._unique2}
"""Operations that synchronise, because the host needs their result or its size."""


class Stream:
    """Pending work: copies to the host."""

    def __init__(self):
        self._copies = []

    def copy(self, source, target):
        source = source.clone()  # its current value
        self._copies.append(lambda: target.copy_(source))

    def run(self):
        for copy in self._copies:
            copy()
        self._copies.clear()


class Graph:
    """Like torch.cuda.CUDAGraph."""

    def __init__(self):
        self.operations, self.states = [], {}

    def replay(self):
        for operation in self.operations:
            operation()


class Driver(_DummyBackendModule):
    """The module torch.fakegpu, with counters for tests.

    waits: what the host waited for, in order. operations: the number of operations of torch, except views. launches:
        the number of launches of each Triton kernel. cached_launches: how many of them bypassed Triton. graph: the one
        that is being captured.
    """

    def __init__(self):
        self.waits, self.operations, self.launches, self.cached_launches = [], Counter(), Counter(), 0
        self._index, self.graph, self.spoiled = 1, None, ""
        self._streams = [Stream() for _ in range(self.device_count())]
        self._generators = [torch.Generator().manual_seed(i) for i in range(self.device_count())]
        self._one_at_a_time = threading.RLock()

    # devices, streams and waiting

    def device_count(self):
        return 2

    def current_device(self):
        return self._index

    @contextlib.contextmanager
    def device(self, device):
        before = self._index
        self._index = self._number(device)
        try:
            yield
        finally:
            self._index = before

    def _number(self, device):
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return self._index if index is None else index

    def current_stream(self, device=None):
        return self._streams[self._number(device)]

    def synchronize(self, device=None):
        self.wait("the device")
        self.current_stream(device).run()

    def wait(self, what):
        self.refuse(f"to wait for {what}")
        self.waits.append(what)

    # graphs

    @contextlib.contextmanager
    def capturing(self, graph):
        """Like torch.cuda.graph, on the current device."""
        self.graph, graph.index, self.spoiled = graph, self._index, ""
        try:
            yield
        finally:
            self.graph = None
        assert not self.spoiled, self.spoiled

    def record(self, operation):
        """Add an operation that just ran to the graph that is being captured, if any."""
        if self.graph is not None:
            self.graph.operations.append(operation)

    def is_current_stream_capturing(self):
        return self.graph is not None and self.graph.index == self._index

    def refuse(self, what):
        if self.graph is not None:
            self.spoiled = f"{what} is not permitted during graph capture"
            raise RuntimeError(self.spoiled)

    # generators

    def manual_seed_all(self, seed):
        for generator in self._generators:
            generator.manual_seed(seed)

    def get_rng_state(self, device=None):
        """During graph capture, a position in the graph's random numbers, relative to where a replay starts."""
        generator = self._generators[self._number(device)]
        state, graph = generator.get_state(), self.graph
        if graph is not None:
            key = state.numpy().tobytes()
            self.record(lambda: graph.states.__setitem__(key, generator.get_state()))
        return state

    def set_rng_state(self, state, device=None):
        generator, graph = self._generators[self._number(device)], self.graph
        generator.set_state(state)
        if graph is not None:
            key = state.numpy().tobytes()
            self.record(lambda: generator.set_state(graph.states[key]))

    @property
    def default_generators(self):
        return [
            types.SimpleNamespace(
                get_state=functools.partial(self.get_rng_state, i),
                set_state=functools.partial(self.set_rng_state, device=i),
            )
            for i in range(self.device_count())
        ]

    @contextlib.contextmanager
    def drawing(self, index):
        """Operations use the CPU's generator, so give it the state of this device's generator for a while."""
        with self._one_at_a_time, torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._generators[index].get_state())
            yield
            self._generators[index].set_state(torch.get_rng_state())

    def get_device_name(self, device=None):
        return "no GPU"

    def get_amp_supported_dtype(self):
        return [torch.float16, torch.bfloat16]


driver = Driver()
_setup_privateuseone_for_python_backend(NAME, driver)
DEVICE, OTHER = torch.device(NAME, 0), torch.device(NAME, 1)


class Tensor(torch.Tensor):
    """raw: the data, on the CPU."""

    @staticmethod
    def __new__(cls, raw, index):
        layout = {"strides": raw.stride(), "storage_offset": raw.storage_offset()}
        x = torch.Tensor._make_wrapper_subclass(
            cls, raw.size(), dtype=raw.dtype, device=torch.device(NAME, index), **layout
        )
        x.raw, x.index = raw, index
        return x

    def __repr__(self):
        return f"on {self.device}: {self.raw!r}"

    @property
    def data(self):
        return Tensor(self.raw, self.index)  # in-place changes of it are not counted

    @data.setter
    def data(self, other):
        torch.Tensor.data.__set__(self, other)
        self.raw, self.index = other.raw, other.index

    def tolist(self):
        return self.cpu().tolist()

    def data_ptr(self):
        return self.raw.data_ptr()

    def untyped_storage(self):
        return self.raw.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        here = next(x for x in given if isinstance(x, Tensor))
        packet = func.overloadpacket
        if packet is aten.copy_:
            return _copy(*args[:2], args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        _refuse_a_mixture(func, given)
        target = kwargs.get("device")
        if target is not None and torch.device(target).type != NAME:
            size = kwargs.get("memory_format", torch.preserve_format)
            out = torch.empty_like(here.raw, dtype=kwargs.get("dtype"), memory_format=size)
            return _copy(out, here, kwargs.get("non_blocking", False))
        index = here.index if target is None else driver._number(target)
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        if packet in READS:
            driver.wait(packet.__name__)
        if packet is aten._fused_sdp_choice:
            return 0  # the plain implementation: the others are for particular devices
        draws = torch.Tag.nondeterministic_seeded in func.tags

        def run(args, kwargs):
            with driver.drawing(index) if draws else contextlib.nullcontext():
                return func(*args, **kwargs)

        raw = tree_map(_raw, (args, kwargs))
        inner = run(*raw)
        if not _is_view(func, raw, inner) and "empty" not in packet.__name__:
            driver.operations[packet.__name__] += 1
            driver.record(lambda: _overwrite(inner, run(*raw)))
        out = tree_map(lambda x: Tensor(x, index) if isinstance(x, torch.Tensor) else x, inner)
        return return_and_correct_aliasing(func, args, kwargs, out)


def _raw(x):
    return x.raw if isinstance(x, Tensor) else x


def _memory(tree):
    return {x.untyped_storage().data_ptr() for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.numel()}


def _is_view(func, given, made):
    return not func._schema.is_mutable and _memory(made) <= _memory(given)


def _overwrite(made, anew):
    """Overwrite the outputs of an operation with those of a replay."""
    for old, new in zip(tree_leaves(made), tree_leaves(anew), strict=True):
        if isinstance(old, torch.Tensor) and old.numel() and old.data_ptr() != new.data_ptr():
            old.copy_(new)


def _refuse_a_mixture(func, tensors):
    places = {x.device for x in tensors if x.dim() > 0 or isinstance(x, Tensor)}
    if len(places) > 1 and func.overloadpacket not in (aten.index, aten.index_put_, aten.index_put):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, found {places}")


def _copy(target, source, non_blocking):
    if isinstance(target, Tensor):
        to, by = target.raw, _raw(source)
        to.copy_(by)
        driver.record(lambda: to.copy_(by))
    elif non_blocking:
        driver.current_stream(source.device).copy(source.raw, target)
    else:
        driver.wait("a copy")
        driver.current_stream(source.device).run()
        target.copy_(source.raw)
    return target


_library = torch.library.Library("aten", "IMPL")


def _empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    raw = torch.empty(size, dtype=dtype, device="cpu", memory_format=memory_format or torch.contiguous_format)
    return Tensor(raw, driver._number(device))


def _empty_strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
    return Tensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"), driver._number(device))


def _copy_from(source, target, non_blocking=False):
    return _copy(target, source, non_blocking)


_library.impl("_copy_from", _copy_from, "PrivateUse1")
_library.impl("empty.memory_format", _empty, "PrivateUse1")
_library.impl("empty_strided", _empty_strided, "PrivateUse1")


@contextlib.contextmanager
def emulated(name="sm_90"):
    """Context manager: the emulator executes Triton kernels on tensors of this device as that GPU would."""
    from emulator import emulating
    from gpu_targets import TARGETS, missing

    if missing:
        pytest.skip(missing)
    import triton
    from triton.runtime.jit import JITFunction

    from revdeq.kernels import backend, gpu

    with emulating(TARGETS[name], unordered=["p_alarm"]), pytest.MonkeyPatch.context() as patch:
        run, runs_on = JITFunction.run, gpu.runs_on

        def noted(kernel, args):
            places = {x.device for x in tree_leaves(args) if isinstance(x, torch.Tensor)}
            if places != {torch.device(NAME, driver.current_device())}:
                raise RuntimeError(f"a launch on {NAME}:{driver.current_device()} with tensors on {places}")
            driver.launches[kernel.__name__] += 1
            return tree_map(_raw, args)

        class OnRawMemory:
            """A compiled kernel, which is loaded on one device."""

            def __init__(self, loaded):
                self.loaded, self.index = loaded, driver.current_device()

            def __getitem__(self, grid):
                if self.index != driver.current_device():
                    raise RuntimeError(f"a kernel of {NAME}:{self.index} on {NAME}:{driver.current_device()}")
                return functools.partial(self.call, self.loaded[grid])

            def call(self, launch, *args):
                driver.cached_launches += 1
                given = noted(self.loaded.kernel, args)
                launch(*given)
                driver.record(lambda: launch(*given))

        def on_raw_memory(kernel, *args, **kwargs):
            if driver.graph is not None:
                driver.refuse("to load a kernel")
            return OnRawMemory(run(kernel, *noted(kernel, args), **kwargs))

        patch.setattr(JITFunction, "run", on_raw_memory)
        patch.setattr(triton.runtime.driver.active, "get_current_device", driver.current_device)
        patch.setattr(gpu, "runs_on", lambda device: device.type == NAME or runs_on(device))
        with backend("triton"):
            yield
