"""A cached kernel is launched only with arguments for which Triton would have selected it."""

import pytest
import torch
from gpu_targets import TARGETS, compiling, skip_without_the_compiler

skip_without_the_compiler()

import triton  # noqa: E402
from emulator import emulating  # noqa: E402
from fake_gpu import DEVICE, OTHER, driver, emulated  # noqa: E402
from stub_driver import stub  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from revdeq.kernels import gpu, half_step, reference  # noqa: E402
from revdeq.kernels.gpu import float64, launch  # noqa: E402
from revdeq.kernels.half_step import Coefficients  # noqa: E402
from revdeq.kernels.radix import Radix  # noqa: E402

STEP = Coefficients.rounded(0.8)
N = 1000


@pytest.fixture
def by_triton(monkeypatch):
    """The names of the kernels that Triton launched itself."""
    names, launch_by_triton = [], launch._launch_by_triton

    def noted(kernel, *arguments):
        names.append(kernel.__name__)
        return launch_by_triton(kernel, *arguments)

    monkeypatch.setattr(launch, "_launch_by_triton", noted)
    return names


def relax(h, f, norms=False):
    (h.relax_norms if norms else h.relax)(f, None, torch.empty_like(f))


def made(n=N, offset=0, **settings):
    """A half-step and an f, whose addresses are a multiple of 16 if the offset is 0."""
    state, f = (torch.randn(n + offset, **settings)[offset:] for _ in range(2))
    return gpu.STATES["float64"](state.double(), STEP), f


def made_exact(fraction_bits=24):
    radix = Radix.nearest(0.8, fraction_bits)
    return gpu.STATES["exact"](torch.zeros(N, dtype=torch.int64), radix), torch.randn(N)


def test_a_cached_launch_passes_the_same_arguments_as_triton(monkeypatch, by_triton):
    driver = stub(monkeypatch)
    torch.manual_seed(0)
    copy, adjoint, vjp, initial, floor = *(torch.randn(N) for _ in range(4)), torch.ones(())
    partial = torch.empty(2048)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *size, **settings: partial)
    for h, f in (made(), made_exact()):
        operations = {
            "relax": (f, None, copy),
            "relax_norms": (f, None, copy),
            "invert": (f, None, copy),
            "invert_adjoint": (f, None, copy, adjoint, vjp),
            "invert_compare": (f, None, initial, floor, adjoint, vjp),
        }
        for name, arguments in operations.items():
            driver.calls.clear()
            by_triton.clear()
            for _ in range(2):
                h.done = 1
                getattr(h, name)(*arguments)
            ordinary, cached = driver.calls
            assert len(by_triton) == 1, name
            assert ordinary[:6] == cached[:6], name  # the grid, the stream, the function and its metadata
            hooks_and_arguments = [
                [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in call[7:]] for call in driver.calls
            ]
            assert hooks_and_arguments[0] == hooks_and_arguments[1], name


@pytest.mark.parametrize("offset", [1, 2])
def test_a_kernel_for_aligned_pointers_never_gets_unaligned_ones(by_triton, offset):
    torch.manual_seed(0)
    h, f = made()
    _, other = made(offset=offset)
    assert f.data_ptr() % 16 == 0 != other.data_ptr() % 16
    expected = reference.HalfStep(h.state.clone(), STEP)
    with emulating(TARGETS["sm_90"]):  # which raises for unaligned pointers
        for x in (f, other, f, other):
            relax(h, x)
            relax(expected, x)
    assert len(by_triton) == 2
    assert torch.equal(h.state, expected.state)


def test_a_kernel_for_a_dtype_never_gets_another(by_triton):
    h, f = made()
    with emulating(TARGETS["sm_90"]):
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.bfloat16):
            relax(h, f.to(dtype))
    assert len(by_triton) == 3


def test_a_kernel_of_one_device_is_never_launched_on_another(by_triton):
    driver.cached_launches = 0
    with emulated():  # which raises for a kernel of another device
        for device in (DEVICE, OTHER, DEVICE, OTHER, DEVICE):
            relax(*made(device=device))
    assert len(by_triton) == 2
    assert driver.cached_launches == 3


def test_a_kernel_is_never_launched_with_other_constants(monkeypatch, by_triton):
    h, f = made()
    with emulating(TARGETS["sm_90"]):
        for _ in range(2):
            relax(h, f)
            relax(h, f, norms=True)
        assert len(by_triton) == 2
        monkeypatch.setattr(launch, "SMALL", 0)
        relax(h, f)
        for module in (half_step, launch):
            monkeypatch.setattr(module, "rows_of", lambda n: 8)
        relax(h, f, norms=True)
        assert len(by_triton) == 4
        for fraction_bits in (24, 20, 24):
            relax(*made_exact(fraction_bits))
        assert len(by_triton) == 6


def test_one_kernel_serves_every_even_size_and_another_every_odd_one(by_triton):
    """Above and below 2^31 elements."""
    with compiling(TARGETS["sm_90"]):
        for n in (2**18, 2**31 - 1, 2**31, 2**40, 2**40 + 1):
            f = torch.zeros(1).expand(n)
            gpu.STATES["float64"](torch.zeros(1).double().expand(n), STEP).relax(f, None, f)
    assert len(by_triton) == 2


def test_an_amd_kernel_for_less_than_2_gib_never_gets_more(by_triton):
    with compiling(TARGETS["gfx942"]):
        for size in (4 * N, 2**31 - 4, 2**31):
            relax(made()[0], torch.empty(size // 4)[:N])  # no page of it is touched
    assert len(by_triton) == 2


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_launch_hooks_see_every_launch(monkeypatch, hook):
    driver, (h, f), seen = stub(monkeypatch), made(), []
    relax(h, f)
    getattr(triton.knobs.runtime, hook).add(seen.append)
    try:
        relax(h, f)
        relax(h, f)
    finally:
        getattr(triton.knobs.runtime, hook).remove(seen.append)
    assert all(getattr(triton.knobs.runtime, hook) in call for call in driver.calls[1:])
    assert all(call[6].get()["name"] == "_relax_kernel" for call in driver.calls[1:]), "what the hook is told"


def test_unknown_versions_and_devices_use_tritons_launch(monkeypatch):
    cuda, xpu, kernel = torch.device("cuda", 0), torch.device("xpu", 0), JITFunction(float64._relax_kernel.fn)
    for minor in range(2, 12):
        monkeypatch.setattr(launch, "_VERSION", (3, minor))
        assert launch.is_known(kernel, cuda) == (6 <= minor <= 9)
    monkeypatch.setattr(launch, "_VERSION", (3, 7))
    assert not launch.is_known(kernel, xpu)
    assert not launch.is_known(kernel, torch.device("cpu"))
    assert not launch.is_known(kernel.fn, cuda)  # a kernel of the interpreter
