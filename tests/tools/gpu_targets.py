"""Launches of Triton kernels, specialised and cross-compiled for a GPU without needing one."""

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

import pytest

from revdeq.kernels import backends

try:
    import triton
except ImportError:
    VERSION = (0, 0)
else:
    VERSION = tuple(map(int, triton.__version__.split(".")[:2]))


def lacking(first):
    """Why code that needs at least this version of Triton cannot run, or ""."""
    if VERSION == (0, 0):
        return "Triton is not installed"
    return "" if first <= VERSION else f"Triton is {triton.__version__}: this needs {first[0]}.{first[1]} or later"


missing = lacking((3, 7))  # the first version whose tools disassemble code for all targets
TARGETS = {}
if not lacking((3, 4)):
    from triton._utils import find_paths_if, get_iterable_path
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    from revdeq.kernels import launch as revdeq_launch

    TARGETS |= {f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (75, 80, 86, 89, 90, 100, 103, 120, 121)}
    TARGETS |= {arch: GPUTarget("hip", arch, 64) for arch in ("gfx90a", "gfx942", "gfx950")}
    TARGETS |= {arch: GPUTarget("hip", arch, 32) for arch in ("gfx1100", "gfx1200", "gfx1201")}


def skip_without_the_compiler(first=(3, 7)):
    """Skip a test module. Call it at the top of the module."""
    if reason := lacking(first):
        pytest.skip(reason, allow_module_level=True)


@dataclass
class Launch:
    """arguments: the tensors and numbers that the compiled kernel takes at run time, by name and in order."""

    compiled: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]


_compiled: dict[Any, Any] = {}
"""The kernels compiled by this process. Triton's own cache reads files each time."""


@functools.cache
def _binder(kernel, target):
    return create_function_from_signature(kernel.signature, kernel.params, make_backend(target))


def _packed(kernel, backend, kwargs, bound, specialization, options):
    """The options, signature, constants and attributes that Triton compiles for."""
    if hasattr(kernel, "_pack_args"):
        return kernel._pack_args(backend, kwargs, bound, specialization, options)
    kinds, attributes = zip(*specialization, strict=True)  # Triton 3.4 does this inside its launch
    signature = dict(zip((parameter.name for parameter in kernel.params), kinds, strict=True))
    constants = {
        path: get_iterable_path(list(bound.values()), path)
        for path in find_paths_if(kinds, lambda _, kind: kind == "constexpr")
    }
    attributes = {
        path: backend.parse_attr(get_iterable_path(attributes, path))
        for path in find_paths_if(attributes, lambda _, attribute: isinstance(attribute, str))
    }
    return backend.parse_options(kwargs), signature, constants, attributes


@contextlib.contextmanager
def launching(target, launch):
    """Context manager: launches compile for the target, specialised by Triton's binder, and call `launch`."""
    backend = make_backend(target)

    def specialised(kernel, *args, **kwargs):
        bound, specialization, options = _binder(kernel, target)(*args, **kwargs)
        return bound, specialization, options, (kernel, target, str(specialization), str(options))

    def run(kernel, *args, grid, warmup=False, **kwargs):
        bound, specialization, options, key = specialised(kernel, *args, **kwargs)
        options, signature, constants, attributes = _packed(kernel, backend, kwargs, bound, specialization, options)
        if key not in _compiled:
            source = ASTSource(kernel, signature, constants, attributes)
            _compiled[key] = triton.compile(source, target=target, options=options.__dict__)
        names = [name for name, kind in signature.items() if kind != "constexpr"]
        loaded = Loaded(_compiled[key], kernel, names, key, kwargs, specialised, launch)
        loaded.execute(tuple(grid(bound) if callable(grid) else grid), bound)
        return loaded

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        patch.setattr(backends.gpu, "_warp_size", lambda device: target.warp_size)
        patch.setattr(backends.gpu, "divides_by_reciprocal", lambda device: target.backend == "cuda")
        patch.setattr(revdeq_launch, "_compiled", {})
        patch.setattr(revdeq_launch, "is_known", lambda kernel, device: True)
        patch.setattr(revdeq_launch, "is_amd", lambda: target.backend == "hip")
        patch.setattr(triton.runtime.driver, ACTIVE, Streams())
        yield


class Streams:
    """The methods of Triton's driver that are called before a compiled kernel. CPU tensors have no index."""

    def get_current_device(self):
        return None

    def get_current_stream(self, device):
        return STREAM


STREAM = 1234
ACTIVE = "active" if VERSION < (3, 5) else "_active"
"""The attribute in which Triton stores its driver."""


@dataclass
class Loaded:
    """What Triton's launch returns: a compiled kernel that can be called again. It raises for arguments that it is not
    specialised for, which a GPU would not notice."""

    compiled: Any
    kernel: Any
    names: list[str]
    key: Any
    options: dict[str, Any]
    specialised: Any
    launch: Any
    function: str = "function"
    packed_metadata: str = "metadata"

    def run(self, x, y, z, stream, function, packed_metadata, metadata, enter_hook, exit_hook, *args):
        assert (function, packed_metadata, stream) == (self.function, self.packed_metadata, STREAM)
        assert (metadata, enter_hook, exit_hook) == (None, None, None)
        bound, *_, key = self.specialised(self.kernel, *args, **self.options)
        if key != self.key:
            raise RuntimeError(f"{self.kernel.__name__} is specialised for {self.key[2]} and was given {key[2]}")
        self.execute((x, y, z)[:1], bound)

    def execute(self, grid, bound):
        self.launch(Launch(self.compiled, grid, {name: bound[name] for name in self.names}))


@contextlib.contextmanager
def compiling(target):
    """Context manager: launches only compile, and run nothing."""
    compiled = []
    with launching(target, lambda launch: compiled.append(launch.compiled)):
        yield compiled
