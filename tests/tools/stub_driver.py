"""Triton's driver without a GPU: kernels are specialised, compiled and launched by Triton itself, up to the call that
would hand them to the GPU, which is noted instead."""

import collections

import triton
from gpu_targets import ACTIVE, TARGETS
from triton.runtime.jit import JITFunction

from revdeq.kernels import gpu, gpu_exact, launch


class Driver:
    """calls: what the launcher was called with."""

    def __init__(self, name="sm_90"):
        self.target, self.calls, self.utils = TARGETS[name], [], self

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return None  # as CPU tensors have none

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
    """Launches on CPU tensors go to the driver that this returns. `patch` is pytest's MonkeyPatch."""
    driver = Driver()
    patch.setattr(triton.runtime.driver, ACTIVE, driver)
    patch.setattr(launch, "_compiled", {})
    patch.setattr(launch, "is_known", lambda kernel, device: True)
    for kernel in (*vars(gpu).values(), *vars(gpu_exact).values()):
        if isinstance(kernel, JITFunction):
            patch.setattr(kernel, "device_caches", collections.defaultdict(kernel.create_binder))
    return driver
