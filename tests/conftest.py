import importlib.util
import os
import sys
from types import ModuleType

import pytest
import torch

from revdeq._device import devices, synchronize
from revdeq._solver.deferred import settle
from revdeq.kernels import backends, cpu, cpu_exact

DEVICE = devices()[0]
"""What the tests run on: a GPU, if there is one."""


@pytest.fixture
def device() -> torch.device:
    return DEVICE


@pytest.fixture
def on_device(request):
    """Tensors and modules are made on the device: `pytestmark = pytest.mark.usefixtures("on_device")`.

    Tests that take a half-step or a backend are told where. float32 means float32 here: TF32 would round what the
    tests compare.
    """
    told = {"half_step", "exact_half_step", "backend"} & set(request.fixturenames)
    if DEVICE.type == "cpu" or told or request.node.get_closest_marker("cpu"):
        yield
        return
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        with DEVICE:
            yield
        synchronize(DEVICE)
        settle()  # a verdict that comes late is still this test's
    finally:
        torch.backends.cudnn.allow_tf32 = allowed


def pytest_terminal_summary(terminalreporter):
    """What the kernels cost on an H100, where they were compiled for one."""
    budgets = sys.modules.get("budgets")
    if lines := budgets.summary("sm_90") if budgets else []:
        terminalreporter.section("kernels on an H100 (sm_90), per element of a full block, from their machine code")
        for line in lines:
            terminalreporter.write_line(line)


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


def _chosen(backend, in_c, on_gpu, interpreted_module):
    """A half-step class to compare with the reference, and the device it runs on."""
    if backend == "cpu":
        if cpu.library is None:
            pytest.skip("the C kernel was not built: no C compiler")
        return in_c.HalfStep, torch.device("cpu")
    if backends.gpu is None:
        pytest.skip("Triton is not installed")
    if DEVICE.type != "cpu":
        return on_gpu.HalfStep, DEVICE
    return interpreted_module().HalfStep, torch.device("cpu")


@pytest.fixture(params=["cpu", "triton"])
def half_step(request):
    return _chosen(request.param, cpu, backends.gpu, interpreted_gpu_module)


@pytest.fixture(params=["cpu", "triton"])
def exact_half_step(request):
    """The same for the integer state."""
    return _chosen(request.param, cpu_exact, backends.gpu_exact, interpreted_gpu_exact_module)


@pytest.fixture(params=["cpu", "triton"])
def backend(request, monkeypatch):
    """A backend to force, on CPU tensors."""
    if request.param == "cpu" and cpu.library is None:
        pytest.skip("the C kernel was not built: no C compiler")
    if request.param == "triton":
        if backends.gpu is None:
            pytest.skip("Triton is not installed")
        modules = interpreted_gpu_module(), interpreted_gpu_exact_module()
        monkeypatch.setitem(backends.TRITON.states, "float64", modules[0])
        monkeypatch.setitem(backends.TRITON.states, "exact", modules[1])
    return request.param
