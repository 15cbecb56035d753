"""Which backend runs, and the error or warning if one cannot."""

import contextlib
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import revdeq
from revdeq import kernels
from revdeq.kernels import Coefficients, backends, cpu, reference


def test_an_unknown_backend_is_an_error(monkeypatch):
    with pytest.raises(ValueError, match="backend.name. is 'cuda': expected one of 'triton', 'cpu', .*'reference'"):
        with kernels.backend("cuda"):
            pass
    monkeypatch.setenv("REVDEQ_BACKEND", "c")
    with pytest.raises(ValueError, match="REVDEQ_BACKEND is 'c'"):
        revdeq.solve(torch.cos, torch.zeros(1))


def test_forcing_a_missing_backend_is_an_error(monkeypatch):
    monkeypatch.setattr(cpu, "library", None)
    assert kernels.half_step_for(torch.device("cpu")) is reference.HalfStep
    with kernels.backend("cpu"), pytest.raises(RuntimeError, match="was not built: install a C compiler"):
        revdeq.solve(torch.cos, torch.zeros(1))
    for trouble, remedy in (("no symbol", "reinstall revdeq"), ("libgomp.so.1: No such file", "libgomp1")):
        monkeypatch.setattr(cpu, "trouble", trouble)
        with kernels.backend("cpu"), pytest.raises(RuntimeError, match=rf"\({trouble}\): .*{remedy}"):
            revdeq.solve(torch.cos, torch.zeros(1))
    monkeypatch.setattr(cpu, "library", object())
    with kernels.backend("cpu"), pytest.raises(RuntimeError, match="cannot run on meta tensors"):
        kernels.half_step_for(torch.device("meta"))
    monkeypatch.setitem(backends.TRITON.states, "float64", None)
    with kernels.backend("triton"), pytest.raises(RuntimeError, match="Triton is not installed"):
        revdeq.solve(torch.cos, torch.zeros(1))


@pytest.mark.skipif(backends.gpu is None, reason="Triton is not installed")
def test_forcing_triton_on_the_cpu_is_an_error():
    with kernels.backend("triton"), pytest.raises(RuntimeError, match="cannot run on cpu tensors.*TRITON_INTERPRET"):
        revdeq.solve(torch.cos, torch.zeros(1))


def test_the_environment_forces_a_backend_and_a_context_overrides_it(monkeypatch):
    monkeypatch.setenv("REVDEQ_BACKEND", "reference")
    assert kernels.half_step_for(torch.device("cpu")) is reference.HalfStep
    monkeypatch.setattr(cpu, "library", object())
    with kernels.backend("cpu"):
        assert kernels.half_step_for(torch.device("cpu")) is cpu.HalfStep


def test_the_reference_steps_states_that_a_backend_lacks(monkeypatch):
    monkeypatch.setitem(backends.REFERENCE.states, "new", reference)
    assert kernels.half_step_for(torch.device("cpu"), "new") is reference.HalfStep
    monkeypatch.setattr(cpu, "library", object())
    with kernels.backend("cpu"), pytest.raises(RuntimeError, match="it has no new state: use 'reference'"):
        kernels.half_step_for(torch.device("cpu"), "new")


def test_every_backend_says_where_it_runs_and_which_states_it_has():
    for name, backend in backends.BACKENDS.items():
        assert backend.name == name and backend.title and backend.repair
        assert {"float64", "exact"} <= backend.states.keys() <= backends.REFERENCE.states.keys()
        trouble = backend.trouble_on(torch.device("cpu"))
        assert trouble is None or (trouble.why and trouble.remedy)
    assert backends.REFERENCE.trouble_on(torch.device("meta")) is None


@pytest.mark.skipif(cpu.library is None, reason="the C kernel was not built: no C compiler")
@pytest.mark.parametrize("name", ["LANES", "ROWS"])
def test_a_library_with_other_chunk_sizes_is_rejected(monkeypatch, name):
    monkeypatch.setattr(cpu, name, 128)
    with pytest.raises(OSError, match="has chunks of 16 rows of 256 lanes, not"):
        cpu.load(cpu.library._name)


def test_without_tritons_own_driver_the_reference_runs_on_a_gpu(monkeypatch):
    """Triton builds it with a C compiler on first use, which also fails without a GPU."""
    gpu = pytest.importorskip("revdeq.kernels.gpu", reason="needs Triton")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    gpu.driver_trouble.cache_clear()
    try:
        trouble = backends.TRITON.trouble_on(torch.device("cuda"))
        assert "Triton cannot build its driver (" in trouble.why and "python3-dev" in trouble.remedy
        assert backends.backend_for(torch.device("cuda")) is backends.REFERENCE
    finally:
        gpu.driver_trouble.cache_clear()


@pytest.fixture
def a_gpu(monkeypatch):
    """A GPU as far as torch can tell, with a Triton driver that loads nothing."""
    pytest.importorskip("revdeq.kernels.gpu", reason="needs Triton")
    stub_driver = pytest.importorskip("stub_driver", exc_type=ImportError)
    driver = stub_driver.stub(monkeypatch)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("torch.cuda.device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(backends.gpu, "warps", lambda device: 4)
    for cached in (backends.gpu.driver_trouble, backends.gpu._first_kernel_trouble, backends._say):
        cached.cache_clear()
    yield driver
    for cached in (backends.gpu.driver_trouble, backends.gpu._first_kernel_trouble, backends._say):
        cached.cache_clear()


CUDA = torch.device("cuda", 0)


def test_a_kernel_that_does_not_load_warns_once_and_the_reference_runs(monkeypatch, a_gpu):
    tried = []

    def fail(name, *_):
        tried.append(name)
        raise RuntimeError("Triton Error [CUDA]: the provided PTX was compiled\nwith an unsupported toolchain")

    monkeypatch.setattr(a_gpu, "load_binary", fail)
    with pytest.warns(RuntimeWarning) as told:
        for _ in range(2):
            backends.say_once_what_is_missing(CUDA, "float64")
    (warning,) = told
    assert str(warning.message).startswith(
        "Triton cannot compile or load its kernels (RuntimeError: Triton Error [CUDA]: the provided PTX was compiled "
        "with an unsupported toolchain), so PyTorch's own operations run instead"
    )
    assert str(warning.message).endswith("update Triton and the driver of the GPU")
    assert backends.backend_for(CUDA) is backends.REFERENCE
    assert len(tried) == 1
    with backends.backend("triton"), pytest.raises(RuntimeError, match="is forced, but Triton cannot compile or load"):
        backends.backend_for(CUDA)


def test_a_gpu_that_triton_does_not_know_is_reported(monkeypatch, a_gpu):
    def fail(*_, **__):
        raise RuntimeError("ptxas fatal: Value 'sm_999' is not defined for option 'gpu-name'")

    monkeypatch.setattr("triton.compiler.compile", fail)
    assert "sm_999" in backends.TRITON.trouble_on(CUDA).why


def test_the_check_loads_a_kernel_without_launching_it(a_gpu):
    assert backends.TRITON.trouble_on(CUDA) is None
    assert not a_gpu.calls


def test_nothing_is_compiled_during_graph_capture(monkeypatch, a_gpu):
    monkeypatch.setattr(a_gpu, "load_binary", lambda *_: pytest.fail("it was loaded"))
    with monkeypatch.context() as patch:
        patch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
        assert backends.TRITON.trouble_on(CUDA) is None


def test_a_first_launch_that_fails_during_graph_capture_names_the_remedy(monkeypatch, a_gpu):
    def fail(*_):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(a_gpu, "load_binary", fail)
    state, copy = torch.zeros(4).double(), torch.zeros(4)
    half = backends.gpu.HalfStep(state, copy)
    with pytest.raises(RuntimeError, match="operation not permitted"):
        half.relax(copy, None, Coefficients.rounded(0.5))
    monkeypatch.setattr("revdeq.kernels.launch.is_capturing", lambda device: True)
    message = (
        r"_relax_kernel cannot be compiled or loaded .* \(RuntimeError\): run the captured code once before capturing"
    )
    with pytest.raises(RuntimeError, match=message):
        half.relax(copy, None, Coefficients.rounded(0.5))


def test_the_reference_divides_on_every_device():
    """On GPUs torch does not divide by a number: it multiplies by its reciprocal, rounded."""
    divisors = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket is torch.ops.aten.div:
                divisors.append(args[1])
            return function(*args, **(kwargs or {}))

    state, f = torch.randn(8, dtype=torch.float64), torch.randn(8)
    with Watching():
        reference.invert(state, f, torch.empty(8), Coefficients.rounded(0.8))
    assert len(divisors) == 1 and isinstance(divisors[0], torch.Tensor) and divisors[0].device == state.device


def test_a_missing_c_kernel_warns_once(monkeypatch):
    monkeypatch.setattr(cpu, "library", None)
    monkeypatch.setattr(cpu, "trouble", "")
    backends._say.cache_clear()
    with pytest.warns(RuntimeWarning, match="the C kernel was not built, so PyTorch's own operations run instead"):
        revdeq.solve(torch.cos, torch.zeros(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        revdeq.solve(torch.cos, torch.zeros(3))  # once
        backends._say.cache_clear()
        with revdeq.kernels.backend("reference"):
            revdeq.solve(torch.cos, torch.zeros(3))  # explicitly requested
