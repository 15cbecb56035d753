"""A compiled kernel is called again only for what Triton would have chosen it for."""

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

NEEDS_LEAVES = pytest.mark.skipif(launch._VERSION < launch.TOGETHER, reason="this Triton takes no kernels for leaves")
STEP = Coefficients.rounded(0.8)
N = 1000


@pytest.fixture
def by_triton(monkeypatch):
    """The kernels that Triton was asked to launch."""
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


def test_the_launcher_gets_from_a_cached_launch_what_it_gets_from_tritons(monkeypatch, by_triton):
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


@NEEDS_LEAVES
def test_leaves_that_are_alike_have_one_launch(monkeypatch, by_triton):
    """Which gets the same when it is cached."""
    driver = stub(monkeypatch)
    rows = [bound(n) for n in (5000, 1, 16, 0, 17, 4096)]
    for _ in range(2):
        relax_together(rows)
    assert by_triton == ["_relax_leaves_kernel"]
    same_calls("relax", by_triton, *driver.calls)
    (programs, *_), (states, fs, read, copies, sizes, first, *_) = driver.calls[0], driver.calls[0][9:]
    there = [(half, f) for half, f in rows if f.numel()]
    for tensors, expected in ((states, [h.state for h, _ in there]), (fs, [f for _, f in there])):
        assert all(a is b for a, b in zip(tensors, expected, strict=True))
    assert all(a is half.copy for a, (half, _) in zip(copies, there, strict=True)) and read is None
    assert [x // 2 - 1 for x in sizes] == [5000, 1, 16, 17, 4096]
    assert [x // 2 - 1 for x in first] == [0, 5, 6, 7, 8]
    assert programs == 12


def relax_together(rows, step=STEP):
    with launch.together():
        for half, f in rows:
            half.relax(f, None, step)


@NEEDS_LEAVES
def test_no_sizes_of_leaves_compile_a_kernel_after_the_first(by_triton):
    with emulating(TARGETS["sm_90"]):  # where a kernel that is specialised for others is an error
        for sizes in ((5000, 1, 16), (1, 1, 1), (16, 1024, 8), (16 * 1024, 1, 33), (7 * 1024, 1023, 7)):
            rows = [bound(n) for n in sizes]
            expected = [(half.state.clone(), torch.empty(n)) for (half, _), n in zip(rows, sizes, strict=True)]
            relax_together(rows)
            for (half, f), (state, copy) in zip(rows, expected, strict=True):
                reference.relax(state, f, None, copy, STEP)
                assert torch.equal(half.state, state)
                assert torch.equal(half.copy, copy)
    assert len(by_triton) == 1
    with compiling(TARGETS["sm_90"]):
        for n in (5000, 2**30 - 2, 2**30, 2**40):  # a number of leaves travels with one bit more
            state, f = torch.zeros(1).double().expand(n), torch.zeros(1).expand(n)
            relax_together([bound(), bound(), (gpu.HalfStep(state, f), f)])
    assert len(by_triton) == 3


LEAVES, ONE = "_relax_leaves_kernel", "_relax_kernel"


def launches(rows, target="sm_90"):
    """The kernels that are launched for rows of half-steps, outputs of f and steps."""
    with compiling(TARGETS[target]) as compiled, launch.together():
        for half, f, step in rows:
            half.relax(f, None, step)
    return [kernel.name for kernel in compiled]


@NEEDS_LEAVES
def test_leaves_that_differ_have_launches_of_their_own():
    rows = [(*bound(), STEP) for _ in range(4)]
    assert launches(rows) == [LEAVES]
    assert launches([*rows, (*bound(offset=1), STEP)]) == [LEAVES, ONE]
    assert launches([(half, f.bfloat16() if i % 2 else f, step) for i, (half, f, step) in enumerate(rows)]) == 2 * [
        LEAVES
    ]
    other = Coefficients.rounded(0.5)
    assert launches([*rows, (*bound(), other), (*bound(), STEP), (*bound(), other)]) == 2 * [LEAVES]
    assert launches(rows[:1]) == [ONE]
    much = torch.empty(2**29)[:N]  # of which no page is touched
    rows = [(half, much if i % 2 else f, step) for i, (half, f, step) in enumerate(rows)]
    assert launches(rows) == [LEAVES]
    assert launches(rows, "gfx942") == 2 * [LEAVES]


@NEEDS_LEAVES
def test_more_leaves_than_fit_have_several_launches():
    rows = [(*bound(), STEP) for _ in range(17)]
    assert launches(rows[:8]) == [LEAVES]
    assert launches(rows) == [LEAVES, LEAVES, ONE]


def test_leaves_are_launched_one_by_one_where_it_is_not_known_what_triton_asks(monkeypatch, by_triton):
    stub(monkeypatch)
    monkeypatch.setattr(launch, "is_known", lambda kernel, device: False)
    relax_together([bound() for _ in range(3)])
    assert by_triton == 3 * ["_relax_kernel"]


def test_leaves_are_launched_one_by_one_where_their_kernels_are_not_compiled(monkeypatch, by_triton):
    driver = stub(monkeypatch)
    monkeypatch.setattr(launch, "_VERSION", (3, 6))
    relax_together([bound() for _ in range(3)])
    assert by_triton == ["_relax_kernel"]
    assert len(driver.calls) == 3


@NEEDS_LEAVES
def test_after_an_error_nothing_is_launched_late(monkeypatch, by_triton):
    driver = stub(monkeypatch)
    rows = [bound() for _ in range(3)]
    with pytest.raises(AttributeError):
        relax_together([*rows, (rows[0][0], "no tensor")])
    assert not driver.calls
    relax_together(rows)
    assert by_triton == ["_relax_leaves_kernel"]


@pytest.mark.parametrize("offset", [1, 2])
def test_a_kernel_for_aligned_pointers_never_gets_others(by_triton, offset):
    torch.manual_seed(0)
    half, f = bound()
    _, other = bound(offset=offset)
    assert f.data_ptr() % 16 == 0 != other.data_ptr() % 16
    expected, copy = half.state.clone(), torch.empty(N)
    with emulating(TARGETS["sm_90"]):  # where it is an error
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


def test_the_tests_would_notice(monkeypatch):
    monkeypatch.setattr(launch, "_kinds", lambda tensors: [None if x is None else x.dtype for x in tensors])
    half, f = bound()
    _, other = bound(offset=1)
    with emulating(TARGETS["sm_90"]), pytest.raises(RuntimeError, match="is specialised for .* and was given"):
        half.relax(f, None, STEP)
        half.relax(other, None, STEP)


def test_a_kernel_of_one_device_is_never_launched_on_another(by_triton):
    driver.cached_launches = 0
    with emulated():  # where it is an error
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
        monkeypatch.setattr(gpu, "RELAX_BLOCK", 512)
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


def test_a_kernel_is_never_launched_with_a_longer_number_of_elements(by_triton):
    with compiling(TARGETS["sm_90"]):
        for n in (5000, 2**31 - 1, 2**31, 2**40):
            state, f = torch.zeros(1).double().expand(n), torch.zeros(1).expand(n)
            gpu.HalfStep(state, f).relax(f, None, STEP)
    assert len(by_triton) == 2


def test_a_kernel_for_little_memory_never_gets_much(by_triton):
    with compiling(TARGETS["gfx942"]):
        for size in (4 * N, 2**31 - 4, 2**31):
            half, _ = bound()
            half.relax(torch.empty(size // 4)[:N], None, STEP)  # of which no page is touched
    assert len(by_triton) == 2


def test_no_kernel_is_specialised_for_the_value_of_a_number():
    """Of which a key holds the types alone."""
    kernels = [k for module in (gpu, gpu_exact) for name, k in vars(module).items() if name.endswith("_kernel")]
    assert len(kernels) == 16
    for kernel in kernels:
        numbers = [p for p in kernel.params if not p.is_constexpr and not p.name.startswith("p_")]
        assert numbers
        assert all(p.do_not_specialize for p in numbers), kernel.__name__


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_who_watches_launches_sees_them_all(monkeypatch, by_triton, hook):
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


def test_who_is_asked_before_a_launch_or_debugs_gets_tritons(monkeypatch, by_triton):
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


def test_where_it_is_not_known_what_triton_asks_triton_launches(monkeypatch):
    cuda, xpu, kernel = torch.device("cuda", 0), torch.device("xpu", 0), JITFunction(gpu._relax_kernel.fn)
    for minor in range(2, 12):
        monkeypatch.setattr(launch, "_VERSION", (3, minor))
        assert launch.is_known(kernel, cuda) == (5 <= minor <= 9)
    monkeypatch.setattr(launch, "_VERSION", (3, 7))
    assert not launch.is_known(kernel, xpu)
    assert not launch.is_known(kernel, torch.device("cpu"))
    assert not launch.is_known(kernel.fn, cuda)  # as the interpreter's are none of Triton's


@pytest.mark.parametrize(
    ("knobs", "name"),
    [
        ("runtime", "add_stages_inspection_hook"),
        ("compilation", "instrumentation_mode"),
        ("compilation", "fpsan_homomorphic_casts"),
    ],
)
def test_what_changes_compilation_is_asked_for_in_the_versions_that_have_it(monkeypatch, by_triton, knobs, name):
    driver = stub(monkeypatch)
    half, f = bound()
    known = SimpleNamespace(**{key: getattr(triton.knobs.runtime, key) for key in RUNTIME}), SimpleNamespace()
    with monkeypatch.context() as patch:  # of Triton's own launch, the knobs must be the real ones
        half.relax(f, None, STEP)
        patch.setattr(launch.triton, "knobs", SimpleNamespace(runtime=known[0], compilation=known[1]))
        half.relax(f, None, STEP)
        assert len(by_triton) == 1
        same_calls("relax", by_triton, *driver.calls)
        setattr(getattr(triton.knobs, knobs), name, lambda *_: None)
        assert launch._is_watched(gpu._relax_kernel)


RUNTIME = ("launch_enter_hook", "launch_exit_hook", "debug")
"""Of Triton's knobs, those that every version has."""
