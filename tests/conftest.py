import dataclasses
import importlib
import importlib.util
import os
import sys
from types import ModuleType

# Some virtual machines report AMX without supporting it, and a bfloat16 product then crashes the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import pytest
import torch

from revdeq._device import devices, synchronize
from revdeq._solver.check import settle
from revdeq.kernels import backends, cpu

DEVICE = devices()[0]
"""The device that tests run on: a GPU, if there is one."""


@pytest.fixture
def device() -> torch.device:
    return DEVICE


@pytest.fixture
def on_device(request, simulated):
    """Creates tensors and modules on the device: `pytestmark = pytest.mark.usefixtures("on_device")`.

    Fixtures for half-steps and backends choose their own device. TF32 is off, because it would round what the tests
    compare.
    """
    told = TOLD_WHERE & set(request.fixturenames)
    if simulated or DEVICE.type == "cpu" or told or request.node.get_closest_marker("cpu"):
        yield
        return
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        with DEVICE:
            yield
        synchronize(DEVICE)
        settle()  # so that deferred errors belong to this test
    finally:
        torch.backends.cudnn.allow_tf32 = allowed


TOLD_WHERE = {"half_steps", "backend"}
SIMULATED = ("test_solve.py", "test_gradient.py")
"""Files whose tests run a second time on the simulated GPU of tests/tools/fake_gpu.py, except for those that take long
there."""

NOT_SIMULATED = {
    "test_gradcheck",
    "test_gradient_equals_stored_graph_in_the_settings_of_the_paper",
    "test_memory_grows_with_what_is_kept",
}


NO_FAKE_GPU: str | None = None
try:  # here, because devices must be registered before the first backward pass of the process
    importlib.import_module("fake_gpu")
except pytest.skip.Exception as reason:
    NO_FAKE_GPU = str(reason)


def pytest_generate_tests(metafunc):
    name = metafunc.function.__name__
    told = TOLD_WHERE & set(metafunc.fixturenames) or any(metafunc.definition.iter_markers("cpu"))
    if metafunc.definition.path.name in SIMULATED and not told and name not in NOT_SIMULATED:
        marks = [] if NO_FAKE_GPU is None else [pytest.mark.skip(reason=NO_FAKE_GPU)]
        values = [pytest.param(False, id=DEVICE.type), pytest.param(True, id="fakegpu", marks=marks)]
        metafunc.parametrize("simulated", values, indirect=True)


@pytest.fixture(autouse=True)
def simulated(request):
    """Whether tensors and modules are created on the simulated GPU."""
    if not getattr(request, "param", False):
        yield False
        return
    import fake_gpu

    with fake_gpu.DEVICE:
        yield True
    synchronize(fake_gpu.DEVICE)
    settle()


def interpreted_gpu_package() -> ModuleType:
    """A second copy of the package whose kernels are interpreted: Triton decides this when it decorates them."""
    name = f"{backends.gpu.__name__}_interpreted"
    if name not in sys.modules:
        _convert_bfloat16_as_a_gpu_does()
        _interpret_faster()
        file = backends.gpu.__file__
        spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=[os.path.dirname(file)])
        sys.modules[name] = importlib.util.module_from_spec(spec)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


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


def _interpret_faster() -> None:
    """A launch replaces all functions of Triton's language, and the interpreter repeats this in each function that a
    kernel calls. It also looks for overflows of integers, which compiled kernels do not. Both take most of its time."""
    from triton.runtime import interpreter

    interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


NAMES = ["cpu", "triton"]
"""The backends that are compared with the reference."""


def _usable(name):
    if name == "triton" and backends.gpu is None:
        pytest.skip("Triton is not installed")
    if name == "cpu" and cpu.library is None:
        pytest.skip("the C kernel was not built: no C compiler")
    return name


@pytest.fixture(params=NAMES)
def half_steps(request):
    """The classes of half-steps, by state, to compare with the reference, and the device they run on."""
    name = _usable(request.param)
    if name == "triton" and DEVICE.type == "cpu":
        return interpreted_gpu_package().STATES, torch.device("cpu")
    return backends.BACKENDS[name].states, DEVICE if name == "triton" else torch.device("cpu")


@pytest.fixture(params=NAMES)
def backend(request, monkeypatch):
    """A backend to force, on CPU tensors."""
    if _usable(request.param) == "triton":
        monkeypatch.setattr(backends, "gpu", interpreted_gpu_package())
        for state, half_step in backends.gpu.STATES.items():
            monkeypatch.setitem(backends.TRITON.states, state, half_step)
    return request.param
