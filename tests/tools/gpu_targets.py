"""Launches of Triton kernels, specialised and cross-compiled for a GPU without needing one."""

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

import pytest

try:
    import triton
except ImportError:
    VERSION = (0, 0)
else:
    VERSION = tuple(map(int, triton.__version__.split(".")[:2]))

FIRST = (3, 7)
"""The first version of Triton whose tools disassemble code for all targets."""
missing = "" if VERSION >= FIRST else f"needs Triton {FIRST[0]}.{FIRST[1]} or later"
TARGETS = {}
if not missing:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    from revdeq.kernels.gpu import float64
    from revdeq.kernels.gpu import launch as revdeq_launch

    TARGETS |= {f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (75, 80, 86, 89, 90, 100, 103, 120, 121)}
    TARGETS |= {arch: GPUTarget("hip", arch, 64) for arch in ("gfx90a", "gfx942", "gfx950")}
    TARGETS |= {arch: GPUTarget("hip", arch, 32) for arch in ("gfx1100", "gfx1200", "gfx1201")}


def skip_without_the_compiler():
    """Skip a test module. Call it at the top of the module."""
    if missing:
        pytest.skip(missing, allow_module_level=True)


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


@contextlib.contextmanager
def launching(target, launch):
    """Context manager: launches compile for the target, specialised by Triton's binder, and call `launch`."""
    backend = make_backend(target)

    def specialised(kernel, *args, **kwargs):
        bound, specialization, options = _binder(kernel, target)(*args, **kwargs)
        return bound, specialization, options, (kernel, target, str(specialization), str(options))

    def run(kernel, *args, grid, warmup=False, **kwargs):
        bound, specialization, options, key = specialised(kernel, *args, **kwargs)
        packed = kernel._pack_args(backend, kwargs, bound, specialization, options)
        options, signature, constants, attributes = packed
        if key not in _compiled:
            source = ASTSource(kernel, signature, constants, attributes)
            _compiled[key] = triton.compile(source, target=target, options=options.__dict__)
        names = [name for name, kind in signature.items() if kind != "constexpr"]
        loaded = Loaded(_compiled[key], kernel, names, key, kwargs, specialised, launch)
        loaded.execute(tuple(grid(bound) if callable(grid) else grid), bound)
        return loaded

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        patch.setattr(float64, "is_ptx", lambda device: target.backend == "cuda")
        patch.setattr(revdeq_launch, "_compiled", {})
        patch.setattr(revdeq_launch, "warps", lambda device: revdeq_launch.THREADS // target.warp_size)
        patch.setattr(revdeq_launch, "is_known", lambda kernel, device: True)
        patch.setattr(revdeq_launch, "is_amd", lambda: target.backend == "hip")
        patch.setattr(triton.runtime.driver, "_active", NoDevice())
        yield


class NoDevice:
    """What is called of Triton's driver before a compiled kernel. CPU tensors have no index."""

    utils = None

    def get_current_device(self):
        return None


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

    def __getitem__(self, grid):
        def call(*args):
            bound, *_, key = self.specialised(self.kernel, *args, **self.options)
            if key != self.key:
                raise RuntimeError(f"{self.kernel.__name__} is specialised for {self.key[2]} and was given {key[2]}")
            self.execute(grid[:1], bound)

        return call

    def execute(self, grid, bound):
        self.launch(Launch(self.compiled, grid, {name: bound[name] for name in self.names}))


@contextlib.contextmanager
def compiling(target):
    """Context manager: launches only compile, and run nothing."""
    compiled = []
    with launching(target, lambda launch: compiled.append(launch.compiled)):
        yield compiled
