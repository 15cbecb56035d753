"""Which backend runs, and the error or warning if one cannot."""

import contextlib
import warnings
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import revdeq
from revdeq import kernels
from revdeq.kernels import backends, cpu, reference
from revdeq.kernels.half_step import Coefficients

CPU, CUDA, XPU = torch.device("cpu"), torch.device("cuda", 0), torch.device("xpu", 0)
STEP = Coefficients.rounded(0.8)


@pytest.fixture(autouse=True)
def _nothing_is_remembered():
    """Of what was warned about, and of the GPUs that tests pretend to have."""
    gpu = backends.gpu
    remembering = [backends._warn, backends._same_bits]
    if gpu is not None:
        remembering += [gpu.driver_trouble, gpu.device._first_kernel_trouble]
    for cached in remembering:
        cached.cache_clear()
    yield
    for cached in remembering:
        cached.cache_clear()


def solve():
    return revdeq.solve(torch.cos, torch.zeros(3))


def test_an_unknown_backend_is_an_error(monkeypatch):
    with (
        pytest.raises(ValueError, match="backend.name. is 'cuda': expected one of 'triton', 'cpu', .*'reference'"),
        kernels.backend("cuda"),
    ):
        pass
    monkeypatch.setenv("REVDEQ_BACKEND", "c")
    with pytest.raises(ValueError, match="REVDEQ_BACKEND is 'c'"):
        solve()


def test_a_missing_c_kernel_warns_once_or_is_an_error_if_it_is_forced(monkeypatch):
    for problem, why, remedy in (
        (None, "was not built", "install a C compiler"),
        (OSError("no symbol"), r"cannot be loaded \(no symbol\)", "reinstall revdeq"),
        (OSError("libgomp.so.1: No such file"), r"\(libgomp.so.1: No such file\)", "libgomp1"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr("importlib.util.find_spec", mock.Mock(return_value=None, side_effect=problem))
            library, trouble = cpu.found()
        monkeypatch.setattr(cpu, "library", library)
        monkeypatch.setattr(cpu, "trouble", trouble)
        with pytest.warns(RuntimeWarning, match=f"{why}, so PyTorch's own operations run instead.*{remedy}") as told:
            solve()
            solve()
            kernels.relax(torch.zeros(3).double(), torch.ones(3), 0.5)
        assert len(told) == 1
        with kernels.backend("cpu"), pytest.raises(RuntimeError, match=f"is forced, but .*{why}: .*{remedy}"):
            solve()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with kernels.backend("reference"):
                solve()  # explicitly requested


def test_a_forced_backend_must_run_on_the_device(monkeypatch):
    monkeypatch.setattr(cpu, "library", object())
    with kernels.backend("cpu"), pytest.raises(RuntimeError, match="cannot run on meta tensors"):
        backends.backend_for(torch.device("meta"))
    assert backends.backend_for(torch.device("meta")) is backends.REFERENCE
    with kernels.backend("triton"):
        if backends.gpu is not None:
            with pytest.raises(RuntimeError, match="cannot run on cpu tensors.*TRITON_INTERPRET"):
                solve()
        monkeypatch.setattr(backends, "gpu", None)
        with pytest.raises(RuntimeError, match="Triton is not installed"):
            solve()


def test_the_environment_forces_a_backend_and_a_context_overrides_it(monkeypatch):
    monkeypatch.setenv("REVDEQ_BACKEND", "reference")
    assert backends.backend_for(CPU) is backends.REFERENCE
    monkeypatch.setattr(cpu, "library", object())
    with kernels.backend("cpu"):
        assert backends.backend_for(CPU) is backends.C


def test_without_tritons_own_driver_the_reference_runs_on_a_gpu(monkeypatch):
    """Triton builds it with a C compiler on first use, which also fails without a GPU."""
    pytest.importorskip("revdeq.kernels.gpu", reason="needs Triton")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.warns(RuntimeWarning, match=r"Triton cannot build its driver \(.*python3-dev"):
        assert backends.backend_for(CUDA) is backends.REFERENCE


@pytest.fixture
def a_gpu(monkeypatch):
    """A GPU as far as torch can tell, with a Triton driver that loads nothing."""
    pytest.importorskip("revdeq.kernels.gpu", reason="needs Triton")
    stub_driver = pytest.importorskip("stub_driver", exc_type=ImportError)
    driver = stub_driver.stub(monkeypatch)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("torch.cuda.device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr("revdeq.kernels.gpu.launch.warps", lambda device: 4)
    monkeypatch.setattr("revdeq.kernels.gpu.device.warps", lambda device: 4)
    return driver


def test_a_kernel_that_does_not_load_warns_once_and_the_reference_runs(monkeypatch, a_gpu):
    fails = mock.Mock(side_effect=RuntimeError("[CUDA]: the provided PTX was compiled\nwith another toolchain"))
    monkeypatch.setattr(a_gpu, "load_binary", fails)
    with pytest.warns(RuntimeWarning) as told:
        assert backends.backend_for(CUDA) is backends.backend_for(CUDA) is backends.REFERENCE
    (warning,) = told
    assert str(warning.message).startswith(
        "Triton cannot compile or load its kernels (RuntimeError: [CUDA]: the provided PTX was compiled with another "
        "toolchain), so PyTorch's own operations run instead"
    )
    assert str(warning.message).endswith("update Triton and the driver of the GPU")
    assert fails.call_count == 1
    with backends.backend("triton"), pytest.raises(RuntimeError, match="is forced, but Triton cannot compile or load"):
        backends.backend_for(CUDA)


def test_the_check_loads_a_kernel_without_launching_it_and_not_during_graph_capture(monkeypatch, a_gpu):
    with monkeypatch.context() as patch:
        patch.setattr(a_gpu, "load_binary", lambda *_: pytest.fail("it was loaded"))
        patch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
        assert backends.TRITON.trouble_on(CUDA) is None
    assert backends.TRITON.trouble_on(CUDA) is None
    assert not a_gpu.calls


def test_a_gpu_that_triton_does_not_know_is_reported(monkeypatch, a_gpu):
    fatal = RuntimeError("ptxas fatal: Value 'sm_999' is not defined for option 'gpu-name'")
    monkeypatch.setattr("triton.compiler.compile", mock.Mock(side_effect=fatal))
    assert "sm_999" in backends.TRITON.trouble_on(CUDA)[0]


def test_a_first_launch_that_fails_during_graph_capture_names_the_remedy(monkeypatch, a_gpu):
    fails = mock.Mock(side_effect=RuntimeError("operation not permitted when stream is capturing"))
    monkeypatch.setattr(a_gpu, "load_binary", fails)
    half = backends.gpu.STATES["float64"](torch.zeros(4).double(), STEP)
    with pytest.raises(RuntimeError, match="operation not permitted"):
        half.relax(torch.zeros(4), None, torch.zeros(4))
    monkeypatch.setattr("revdeq.kernels.gpu.launch.is_capturing", lambda device: True)
    message = r"cannot be compiled or loaded .* \(RuntimeError\): run the captured code once before capturing"
    with pytest.raises(RuntimeError, match=message):
        half.relax(torch.zeros(4), None, torch.zeros(4))


class Contracted(reference.HalfStep):
    """A compiler that rounds a multiply-add once."""

    def _relax(self, f_z, z, copy, partial):
        super()._relax(f_z, z, copy, partial)
        self.state.mul_(1 + 2.0**-52)


@pytest.mark.parametrize("contracts", [False, True])
def test_on_intels_gpus_bits_are_compared_before_the_kernels_are_used(monkeypatch, contracts):
    """Here a CPU tensor stands for one of the GPU, and the reference for Triton's kernels."""
    compared, results = [], backends._results
    driver = mock.Mock(runs_on=lambda _: True, driver_trouble=lambda _: "", kernel_trouble=lambda _: "")
    monkeypatch.setattr(backends, "gpu", driver)
    monkeypatch.setattr(backends, "_results", lambda *args: compared.append(args[-1]) or results(*args[:-1], CPU))
    for state, kind in {**backends.REFERENCE.states, **({"float64": Contracted} if contracts else {})}.items():
        monkeypatch.setitem(backends.TRITON.states, state, kind)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        chosen = {backends.backend_for(XPU).name for _ in range(3)}
    assert chosen == ({"reference"} if contracts else {"triton"})
    assert [str(x.message).partition(",")[0] for x in told] == (
        ["Triton's kernels compute other bits than PyTorch on this GPU"] if contracts else []
    )
    backends.backend_for(CUDA)
    assert compared == [XPU] * (2 if contracts else 4)  # once, by two backends, and with the same bits both states


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
        reference.HalfStep(state, STEP).invert(f, None, torch.empty(8))
    assert len(divisors) == 1 and isinstance(divisors[0], torch.Tensor) and divisors[0].device == state.device
