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
SIMULATED = ("test_solve.py", "test_gradient.py", "test_inside_f.py", "test_monitor.py", "test_memory.py")
"""Files whose tests run a second time on the simulated GPU of tests/tools/fake_gpu.py."""

NOT_SIMULATED = {
    "it expects an error immediately, but on a device errors are deferred": [
        "test_values_exchanged_between_the_passes_are_noticed",
        "test_tensors_exchanged_between_the_passes_are_an_error",
        "test_beyond_its_range_it_warns_once_for_each_place_that_calls",
        "test_it_raises_or_keeps_silent_on_request",
        "test_a_function_that_changes_between_the_passes_is_noticed",
        "test_a_silent_gradient_is_a_right_one",
        "test_the_verdict_of_a_device_comes_with_a_later_solve",
        "test_an_adjoint_equation_that_does_not_converge_is_reported",
    ],
    "it is about the CPU's generator, autocast or default device": [
        "test_dropout_is_one_mask_per_solve",
        "test_a_function_that_draws_nothing_leaves_the_generator_alone",
        "test_an_interruption_leaves_everything_as_it_was",
        "test_autocast_is_restored_in_the_backward_pass",
        "test_the_default_device_is_that_of_the_forward_pass",
        "test_two_solves_in_two_threads_do_not_disturb_each_other",
        "test_two_solves_with_dropout_in_two_threads_each_keep_their_mask",
    ],
    "it has a counterpart in test_gpu_host.py": ["test_without_tolerance_nothing_waits_for_the_device"],
    "tensors implemented in Python do not support it: conjugate views, pickling, subclasses, a kernel's layout": [
        "test_f_may_return_a_negative_view",
        "test_layers_are_copied_saved_and_pickled",
        "test_subclasses_of_tensor_work_or_say_why_not",
        "test_channels_last_is_kept",
    ],
    "torch.compile does not support the device": [
        "test_a_compiled_f",
        "test_a_compiled_model_around_the_solve_breaks_its_graph_once",
    ],
}
SLOWLY_SIMULATED = {
    "test_the_measurement_sees_memory_that_grows",
    "test_peak_memory_is_the_same_at_every_depth",
    "test_gradcheck",
    "test_gradient_equals_stored_graph_in_the_settings_of_the_paper",
    "test_both_passes_give_f_the_same_inputs_bit_for_bit",
    "test_f_may_return_one_part_of_its_state_as_another",
}
"""Only run with `pytest -m full`. The others take half a minute together."""


NO_FAKE_GPU: str | None = None
try:  # here, because devices must be registered before the first backward pass of the process
    importlib.import_module("fake_gpu")
except pytest.skip.Exception as reason:
    NO_FAKE_GPU = str(reason)


def pytest_generate_tests(metafunc):
    name = metafunc.function.__name__
    told = TOLD_WHERE & set(metafunc.fixturenames) or any(metafunc.definition.iter_markers("cpu"))
    left_out = told or any(name in names for names in NOT_SIMULATED.values())
    if metafunc.definition.path.name in SIMULATED and not left_out:
        marks = [pytest.mark.full] if name in SLOWLY_SIMULATED else []
        if NO_FAKE_GPU is not None:
            marks.append(pytest.mark.skip(reason=NO_FAKE_GPU))
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
