import importlib.util
import os
import sys
from types import ModuleType

import pytest
import torch

from revdeq.kernels import backends, cpu


def interpreted(original: ModuleType) -> ModuleType:
    """A module of kernels a second time, with its kernels interpreted: Triton decides when it decorates them."""
    name = f"{original.__name__}_interpreted"
    if name not in sys.modules:
        before = os.environ.get("TRITON_INTERPRET")
        os.environ["TRITON_INTERPRET"] = "1"
        try:
            spec = importlib.util.spec_from_file_location(name, original.__file__)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        finally:
            os.environ.pop("TRITON_INTERPRET")
            if before is not None:
                os.environ["TRITON_INTERPRET"] = before
        sys.modules[name] = module
    return sys.modules[name]


def interpreted_gpu_module() -> ModuleType:
    if f"{backends.gpu.__name__}_interpreted" not in sys.modules:
        _convert_bfloat16_as_a_gpu_does()
    return interpreted(backends.gpu)


def interpreted_gpu_exact_module() -> ModuleType:
    module = interpreted(backends.gpu_exact)
    module.gpu = interpreted_gpu_module()
    return module


def _convert_bfloat16_as_a_gpu_does() -> None:
    """Triton's interpreter truncates float32 to bfloat16 and loses bfloat16's subnormals; a GPU does neither."""
    from triton import language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def exact(x, source, target, mode):
        if (source, target) == (tl.float32, tl.bfloat16):
            return torch.from_numpy(x.copy()).bfloat16().view(torch.int16).numpy()
        if (source, target) == (tl.bfloat16, tl.float32):
            return torch.from_numpy(x.view("int16")).view(torch.bfloat16).float().numpy()
        return convert(x, source, target, mode)

    interpreter._convert_float = exact


@pytest.fixture(params=["cpu", "triton"])
def half_step(request):
    """A half-step class to compare with the reference, and the device it runs on."""
    if request.param == "cpu":
        if cpu.library is None:
            pytest.skip("the C kernel was not built: no C compiler")
        return cpu.HalfStep, torch.device("cpu")
    if backends.gpu is None:
        pytest.skip("Triton is not installed")
    if torch.cuda.is_available():
        return backends.gpu.HalfStep, torch.device("cuda")
    return interpreted_gpu_module().HalfStep, torch.device("cpu")


@pytest.fixture(params=["cpu", "triton"])
def exact_half_step(request):
    """The same for the integer state."""
    if request.param == "cpu":
        if cpu.library is None:
            pytest.skip("the C kernel was not built: no C compiler")
        return cpu.ExactHalfStep, torch.device("cpu")
    if backends.gpu is None:
        pytest.skip("Triton is not installed")
    if torch.cuda.is_available():
        return backends.gpu_exact.HalfStep, torch.device("cuda")
    return interpreted_gpu_exact_module().HalfStep, torch.device("cpu")


@pytest.fixture(params=["cpu", "triton"])
def backend(request, monkeypatch):
    """A backend to force, on CPU tensors."""
    if request.param == "cpu" and cpu.library is None:
        pytest.skip("the C kernel was not built: no C compiler")
    if request.param == "triton":
        if backends.gpu is None:
            pytest.skip("Triton is not installed")
        modules = interpreted_gpu_module(), interpreted_gpu_exact_module()
        monkeypatch.setattr(backends, "gpu", modules[0])
        monkeypatch.setattr(backends, "gpu_exact", modules[1])
    return request.param
