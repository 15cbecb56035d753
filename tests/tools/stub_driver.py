"""A Triton driver without a GPU: Triton itself specialises, compiles and launches kernels, but the call that would hand
them to the GPU is only recorded."""

import collections

import triton
from gpu_targets import TARGETS
from triton.runtime.jit import JITFunction

from revdeq.kernels.gpu import exact, float64, launch


class Driver:
    """calls: the arguments of each call of the launcher."""

    def __init__(self, name="sm_90"):
        self.target, self.calls, self.utils = TARGETS[name], [], self

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return None  # like the index of CPU tensors

    def get_current_stream(self, device):
        return 1234

    def get_device_properties(self, device):
        return {"max_shared_mem": 2**17}

    def load_binary(self, name, binary, shared, device):
        module, registers, spills, threads = object(), 32, 0, 1024
        return module, name, registers, spills, threads

    def unload_module(self, module):
        pass

    def launcher_cls(self, source, metadata):
        return lambda *arguments: self.calls.append(arguments)


def stub(patch):
    """Send launches on CPU tensors to the returned driver. `patch` is pytest's MonkeyPatch."""
    driver = Driver()
    patch.setattr(triton.runtime.driver, "_active", driver)
    patch.setattr(launch, "_compiled", {})
    patch.setattr(launch, "is_known", lambda kernel, device: True)
    patch.setattr(launch, "warps", lambda device: 4)
    for kernel in (*vars(float64).values(), *vars(exact).values()):
        if isinstance(kernel, JITFunction):
            patch.setattr(kernel, "device_caches", collections.defaultdict(kernel.create_binder))
    return driver
