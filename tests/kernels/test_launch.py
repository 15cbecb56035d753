"""A cached kernel is launched only with arguments for which Triton would have selected it."""

from types import SimpleNamespace

import pytest
import torch
from gpu_targets import TARGETS, compiling, skip_without_the_compiler

skip_without_the_compiler((3, 5))

import triton  # noqa: E402
from emulator import emulating  # noqa: E402
from fake_gpu import DEVICE, OTHER, driver, emulated  # noqa: E402
from stub_driver import stub  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from revdeq.kernels import Coefficients, Radix, gpu, gpu_exact, half_step, launch, reference  # noqa: E402

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


def bound(n=N, offset=0, **settings):
    """A half-step and an f, whose addresses are a multiple of 16 if the offset is 0."""
    state, copy, f = (torch.randn(n + offset, **settings)[offset:] for _ in range(3))
    return gpu.HalfStep(state.double(), copy), f


def exact(fraction_bits=24, **settings):
    radix = Radix.nearest(0.8, fraction_bits)
    state = torch.zeros(N, dtype=torch.int64, **settings)
    return gpu_exact.HalfStep(state, torch.zeros(N, **settings), [radix] * 8), torch.randn(N, **settings), radix


def test_a_cached_launch_passes_the_same_arguments_as_triton(monkeypatch, by_triton):
    driver = stub(monkeypatch)
    torch.manual_seed(0)
    half, f = bound()
    integers, g, radix = exact()
    adjoint, vjp, initial, floor = torch.randn(N), torch.randn(N), torch.zeros(N), torch.ones(())
    partial = half.partial_sums(), integers.partial_sums()
    maxima = half.partial_maxima()
    monkeypatch.setattr(half_step.HalfStep, "partial_maxima", lambda self: maxima)
    for h, x, step in ((half, f, STEP), (integers, g, radix)):
        operations = {
            "relax": (x, None, step),
            "relax_norms": (x, None, step),
            "invert": (x, step),
            "invert_adjoint": (x, adjoint, vjp, None, step, step),
            "invert_compare": (x, initial, floor, adjoint, vjp, None, step, step),
        }
        for name, arguments in operations.items():
            driver.calls.clear()
            by_triton.clear()
            for _ in range(2):
                h.done = 1
                getattr(h, name)(*arguments)
            same_calls(name, by_triton, *driver.calls)
    assert partial[0] is half.partial_sums()


def same_calls(name, by_triton, ordinary, cached):
    assert len(by_triton) == 1, name
    assert len(ordinary) == len(cached)
    assert ordinary[:6] == cached[:6], name  # the grid, the stream, the function and its metadata
    assert all(a is b or a == b for a, b in zip(ordinary[9:], cached[9:], strict=True)), name


@pytest.mark.parametrize("offset", [1, 2])
def test_a_kernel_for_aligned_pointers_never_gets_unaligned_ones(by_triton, offset):
    torch.manual_seed(0)
    half, f = bound()
    _, other = bound(offset=offset)
    assert f.data_ptr() % 16 == 0 != other.data_ptr() % 16
    expected, copy = half.state.clone(), torch.empty(N)
    with emulating(TARGETS["sm_90"]):  # which raises for unaligned pointers
        for x in (f, other, f, other):
            half.relax(x, None, STEP)
            reference.relax(expected, x, None, copy, STEP)
    assert len(by_triton) == 2
    assert torch.equal(half.state, expected)
    assert torch.equal(half.copy, copy)


def test_a_kernel_for_a_dtype_never_gets_another(by_triton):
    half, f = bound()
    with emulating(TARGETS["sm_90"]):
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.bfloat16):
            half.relax(f.to(dtype), None, STEP)
    assert len(by_triton) == 3


def test_these_tests_would_catch_an_incomplete_key(monkeypatch):
    monkeypatch.setattr(launch, "_kinds", lambda tensors: [None if x is None else x.dtype for x in tensors])
    half, f = bound()
    _, other = bound(offset=1)
    with emulating(TARGETS["sm_90"]), pytest.raises(RuntimeError, match="is specialised for .* and was given"):
        half.relax(f, None, STEP)
        half.relax(other, None, STEP)


def test_a_kernel_of_one_device_is_never_launched_on_another(by_triton):
    driver.cached_launches = 0
    with emulated():  # which raises for a kernel of another device
        for device in (DEVICE, OTHER, DEVICE, OTHER, DEVICE):
            half, f = bound(device=device)
            half.relax(f, None, STEP)
    assert len(by_triton) == 2
    assert driver.cached_launches == 3


def test_a_kernel_is_never_launched_with_other_constants(monkeypatch, by_triton):
    half, f = bound()
    with emulating(TARGETS["sm_90"]):
        for _ in range(2):
            half.relax(f, None, STEP)
            half.relax_norms(f, None, STEP)
        assert len(by_triton) == 2
        monkeypatch.setattr(launch, "SMALL", 0)
        half.relax(f, None, STEP)
        monkeypatch.setattr(half_step, "ROWS", 8)
        half._partial = None
        half.relax_norms(f, None, STEP)
        assert len(by_triton) == 4
        half._warps = 2
        half.relax(f, None, STEP)
        assert len(by_triton) == 5
        for fraction_bits in (24, 20, 24):
            integers, g, radix = exact(fraction_bits)
            integers.relax(g, None, radix)
        assert len(by_triton) == 7


@pytest.mark.parametrize("n, programs", [(2**18 - 1, 2**10), (2**18, 2**8)])
def test_small_states_have_small_blocks(monkeypatch, n, programs):
    driver = stub(monkeypatch)
    state, f = torch.zeros(1).double().expand(n), torch.zeros(1).expand(n)
    gpu.HalfStep(state, f).relax(f, None, STEP)
    assert driver.calls[0][0] == programs


def test_a_kernel_for_32_bit_sizes_never_gets_64_bits(by_triton):
    with compiling(TARGETS["sm_90"]):
        for n in (2**18, 2**31 - 1, 2**31, 2**40):
            state, f = torch.zeros(1).double().expand(n), torch.zeros(1).expand(n)
            gpu.HalfStep(state, f).relax(f, None, STEP)
    assert len(by_triton) == 2


def test_an_amd_kernel_for_less_than_2_gib_never_gets_more(by_triton):
    with compiling(TARGETS["gfx942"]):
        for size in (4 * N, 2**31 - 4, 2**31):
            half, _ = bound()
            half.relax(torch.empty(size // 4)[:N], None, STEP)  # no page of it is touched
    assert len(by_triton) == 2


def test_no_kernel_is_specialised_for_the_value_of_a_number():
    """The cache key holds only their types."""
    kernels = [k for module in (gpu, gpu_exact) for name, k in vars(module).items() if name.endswith("_kernel")]
    assert len(kernels) == 10
    for kernel in kernels:
        numbers = [p for p in kernel.params if not p.is_constexpr and not p.name.startswith("p_")]
        assert numbers
        assert all(p.do_not_specialize for p in numbers), kernel.__name__


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_launch_hooks_see_every_launch(monkeypatch, by_triton, hook):
    driver = stub(monkeypatch)
    half, f = bound()
    half.relax(f, None, STEP)
    half.relax(f, None, STEP)
    assert len(by_triton) == 1
    hooks = getattr(triton.knobs.runtime, hook)
    monkeypatch.setattr(hooks, "calls", [print])
    half.relax(f, None, STEP)
    assert len(by_triton) == 2
    assert hooks in driver.calls[-1][7:9]
    monkeypatch.setattr(triton.knobs.runtime, hook, print)
    half.relax(f, None, STEP)
    assert len(by_triton) == 3
    monkeypatch.setattr(triton.knobs.runtime, hook, None)
    half.relax(f, None, STEP)
    assert len(by_triton) == 3


def test_pre_run_hooks_and_debugging_use_tritons_launch(monkeypatch, by_triton):
    stub(monkeypatch)
    half, f = bound()
    half.relax(f, None, STEP)
    seen = []
    monkeypatch.setattr(gpu._relax_kernel, "pre_run_hooks", [lambda *args, **kwargs: seen.append(args)])
    half.relax(f, None, STEP)
    assert len(seen) == 1
    monkeypatch.setattr(gpu._relax_kernel, "pre_run_hooks", [])
    monkeypatch.setattr(triton.knobs.runtime, "debug", True)
    half.relax(f, None, STEP)
    monkeypatch.setattr(triton.knobs.runtime, "debug", False)
    monkeypatch.setattr(triton.knobs.compilation, "instrumentation_mode", "consan", raising=False)
    half.relax(f, None, STEP)
    assert len(by_triton) == 4


def test_unknown_versions_and_devices_use_tritons_launch(monkeypatch):
    cuda, xpu, kernel = torch.device("cuda", 0), torch.device("xpu", 0), JITFunction(gpu._relax_kernel.fn)
    for minor in range(2, 12):
        monkeypatch.setattr(launch, "_VERSION", (3, minor))
        assert launch.is_known(kernel, cuda) == (5 <= minor <= 9)
    monkeypatch.setattr(launch, "_VERSION", (3, 7))
    assert not launch.is_known(kernel, xpu)
    assert not launch.is_known(kernel, torch.device("cpu"))
    assert not launch.is_known(kernel.fn, cuda)  # a kernel of the interpreter


@pytest.mark.parametrize(
    ("knobs", "name"),
    [
        ("runtime", "add_stages_inspection_hook"),
        ("compilation", "instrumentation_mode"),
        ("compilation", "fpsan_homomorphic_casts"),
    ],
)
def test_compilation_knobs_are_checked_in_the_versions_that_have_them(monkeypatch, by_triton, knobs, name):
    driver = stub(monkeypatch)
    half, f = bound()
    known = SimpleNamespace(**{key: getattr(triton.knobs.runtime, key) for key in RUNTIME}), SimpleNamespace()
    with monkeypatch.context() as patch:  # Triton's own launch needs the real knobs
        half.relax(f, None, STEP)
        patch.setattr(launch.triton, "knobs", SimpleNamespace(runtime=known[0], compilation=known[1]))
        half.relax(f, None, STEP)
        assert len(by_triton) == 1
        same_calls("relax", by_triton, *driver.calls)
        setattr(getattr(triton.knobs, knobs), name, lambda *_: None)
        assert launch._is_watched(gpu._relax_kernel)


RUNTIME = ("launch_enter_hook", "launch_exit_hook", "debug")
"""Triton's runtime knobs that every version has."""
