"""`python -m revdeq doctor`: which backend this machine uses and why, and whether its results are correct.

Anything missing or broken is reported as a finding and never crashes the command. A finding that makes results wrong
or impossible means "not ready"; one that only makes them slow is advice.
"""

import contextlib
import dataclasses
import functools
import importlib
import json
import math
import os
import platform
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import _device as measure
from .. import kernels
from .._solver.solve import solve
from ..kernels import Coefficients, Radix, backends, cpu, reference_exact
from ..kernels.half_step import DTYPES

STEPS = {"float64": Coefficients.rounded(0.8), "exact": Radix.nearest(0.8, 24)}
MIXED = {"float64": Coefficients.rounded(0.8, 1.3), "exact": Radix.nearest(0.8, 24, 1.3)}
"""A step of each state, as the solver rounds it, without and with a gamma."""
GRADIENT_ERROR = 2 * 16 * 2.0**-24
"""float32 rounds each of the 32 products that a gradient sums up at N = 16, and some cancel."""

ENOUGH = 0.8
"""The share of a copy's bandwidth below which a kernel is marked as slow."""


@dataclass(frozen=True)
class Finding:
    """fix: the remedy, if any. works: whether results are correct without it."""

    text: str
    fix: str = ""
    works: bool = True
    numbers: dict[str, Any] = field(default_factory=dict)


def run(as_json: bool = False) -> int:
    """Print the findings and a verdict. Returns 0 if this machine is ready, and otherwise 1."""
    findings = {}
    for about, finding in examine():
        findings[about] = finding
        if not as_json:
            print(f"{about:<18} {finding.text}".replace("\n", f"\n{'':<19}"), flush=True)
    ready, sentence = verdict(list(findings.values()))
    if as_json:
        found = {about: dataclasses.asdict(finding) for about, finding in findings.items()}
        print(json.dumps({"ready": ready, "verdict": sentence, "findings": found}, allow_nan=False))
    else:
        print(sentence)
    return 0 if ready else 1


def verdict(findings: list[Finding]) -> tuple[bool, str]:
    problems = [f.fix for f in findings if not f.works]
    if problems:
        return False, f"not ready: {'; '.join(dict.fromkeys(problems))}"
    advice = [f.fix for f in findings if f.fix]
    return True, f"ready, and faster if you {'; '.join(dict.fromkeys(advice))}" if advice else "ready"


def examine() -> Iterator[tuple[str, Finding]]:
    """The name and the finding of each check."""
    for about, look in (("revdeq", software), ("triton", triton), ("C kernel", c_kernel), ("GPU", gpu)):
        yield about, guarded(about, look)
    found = measure.devices()
    for device in found:
        yield f"{device}", guarded(f"{device}", describe, device)
        backend = guarded(f"{device} backend", backend_for, device, device == found[0])
        yield f"{device} backend", backend
        if backend.numbers:
            for name, test in (("bits", same_bits), ("gradient", same_gradient), ("bandwidth", bandwidth)):
                yield f"{device} {name}", guarded(f"{device} {name}", test, device)


def guarded(about: str, look: Callable[..., Finding], *arguments: Any) -> Finding:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return look(*arguments)
    except Exception as error:
        text = f"{type(error).__name__}: {error}".strip()
        fix = f"repair what stopped the check of {about!r} ({text.splitlines()[0]})"
        return Finding(f"failed: {text}", fix, works=False)


def software() -> Finding:
    from .. import __version__

    python, system = platform.python_version(), f"{platform.system()} {platform.machine()}"
    text = f"{__version__} in {Path(__file__).parents[1]}, torch {torch.__version__}, Python {python}, {system}"
    numbers = {"revdeq": __version__, "torch": torch.__version__, "python": python, "system": system}
    return Finding(text, numbers=numbers)


def triton() -> Finding:
    """Only GPUs need Triton. If it is missing there, the finding about their backend says so."""
    try:
        importlib.import_module("revdeq.kernels.gpu")
        launch = importlib.import_module("revdeq.kernels.launch")
        version = importlib.import_module("triton").__version__
    except Exception as error:
        return Finding(f"missing, needed on GPUs only ({type(error).__name__}: {error})")
    if launch.is_known_version():
        return Finding(version, numbers={"triton": version})
    first, last = (".".join(map(str, x)) for x in launch.KNOWN)
    slow = f"a launch takes three times as much Python time as with {first} to {last}, whose launcher revdeq supports"
    return Finding(f"{version}: {slow}", numbers={"triton": version})


def c_kernel() -> Finding:
    threads = torch.get_num_threads()
    numbers = {"built": cpu.library is not None, "threads": threads}
    if cpu.library is not None:
        code = Path(cpu.library._name).read_bytes()
        openmp = any(name in code for name in (b"GOMP_parallel", b"__kmpc_fork_call"))
        text = f"built with OpenMP, threads: {threads}" if openmp else "built without OpenMP, threads: 1"
        return Finding(text, numbers={**numbers, "openmp": openmp})
    if cpu.trouble:
        why, fix = f"cannot be loaded ({cpu.trouble})", cpu.remedy(cpu.trouble)
    else:
        why, fix = why_not_built()
    return Finding(f"missing: it {why}", fix, numbers=numbers)


def why_not_built() -> tuple[str, str]:
    if sys.platform == "win32":
        return "was not built", "install Microsoft C++ Build Tools and reinstall revdeq"
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    if shutil.which(compiler[0]) is None:
        return f"was not built, and there is no C compiler ({compiler[0]})", "install gcc or clang and reinstall revdeq"
    sources = map(str, Path(cpu.__file__).parent.glob("*.c"))
    with tempfile.TemporaryDirectory() as folder:
        command = [*compiler, "-std=c11", "-shared", "-fPIC", *sources, "-o", str(Path(folder) / "cpu.so")]
        result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode == 0:
        return f"was not built, but {compiler[0]} can build it now", "reinstall revdeq, which builds its C kernel"
    errors = [line for line in result.stderr.splitlines() if "error" in line] or ["without a message"]
    return f"was not built, because {compiler[0]} fails: {errors[0]}", "repair the C compiler and reinstall revdeq"


def gpu() -> Finding:
    """The driver, and why an installed GPU cannot be used."""
    versions = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": getattr(torch.version, "xpu", None)}
    runtime = next((f"{name} {version}" for name, version in versions.items() if version), None)
    with warnings.catch_warnings(record=True) as caught:  # torch warns if the driver fails
        warnings.simplefilter("always")
        torch.cuda.is_available()
    count = sum(map(measure.count, measure.GPUS))
    driver = driver_version()
    numbers = {"count": count, "driver": driver, "runtime": runtime}
    text = f"{count or 'none'}, driver {driver or 'not found'}, torch is built for {runtime or 'CPUs only'}"
    there = driver is not None and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")
    if caught or (runtime and there and not count):
        trouble = " ".join(str(w.message) for w in caught) or "it is loaded, but torch finds no device"
        if "too old" in trouble:
            text, fix = f"{text}: the driver is too old for this torch", newer_driver(trouble, runtime)
            return Finding(text, fix, works=False, numbers=numbers)
        return Finding(f"{text}: {trouble}", f"repair the GPU's driver ({trouble})", works=False, numbers=numbers)
    fix = "install a torch that is built for your GPU (https://pytorch.org)" if there and not runtime else ""
    return Finding(text, fix, numbers=numbers)


def newer_driver(trouble: str, runtime: str | None) -> str:
    """The remedy for a driver that is too old. torch's warning has the CUDA version of the driver: 12040 is 12.4."""
    found = re.search(r"found version (\d+)", trouble)
    version = f"{int(found[1]) // 1000}.{int(found[1]) % 1000 // 10}" if found else ""
    older = f"for CUDA {version} or older" if version else "for an older CUDA"
    return f"install a torch that is built {older} (https://pytorch.org), or a driver for {runtime or 'this torch'}"


def driver_version() -> str | None:
    """The version of NVIDIA's driver, if this process may use it: a container may see the driver but not the GPU."""
    if not Path("/dev/nvidiactl").exists():
        return None
    with contextlib.suppress(OSError):
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0].split(":", 1)[1].strip()
    return "of unknown version"


def describe(device: torch.device) -> Finding:
    if device.type == "cpu":
        name, vector = measure.name(device), torch.backends.cpu.get_cpu_capability()
        numbers: dict[str, Any] = {"name": name, "cores": os.cpu_count(), "vector": vector}
        return Finding(f"{name}, {os.cpu_count()} cores, {vector}", numbers=numbers)
    properties = measure.api(device).get_device_properties(device)
    numbers = {"name": properties.name, "memory": properties.total_memory}
    if arch := measure.architecture(device):
        numbers["architecture"] = arch
    memory = f"{properties.total_memory / 2**30:.0f} GiB"
    return Finding(", ".join([properties.name, memory, *([arch] if arch else [])]), numbers=numbers)


def backend_for(device: torch.device, main: bool) -> Finding:
    """The backend of a device, and why. A forced backend need not support devices other than the main one."""
    try:
        chosen = backends.backend_for(device)
    except (RuntimeError, ValueError) as error:
        return Finding(f"none: {error}", f"correct REVDEQ_BACKEND: {error}" if main else "", not main)
    faster = next(b for b in backends.BACKENDS.values() if b.is_for(device))
    trouble, fix = faster.trouble_on(device), ""
    if os.environ.get("REVDEQ_BACKEND"):
        why = "forced by REVDEQ_BACKEND"
    elif trouble is None:
        why = "the fastest here"
    else:
        why = f"because {trouble.why}"
        fix = "" if faster is backends.C else trouble.remedy  # the C kernel's own finding has the remedy
    return Finding(f"{chosen.name}: {chosen.title}, {why}", fix, numbers={"backend": chosen.name})


def same_bits(device: torch.device) -> Finding:
    """Compare all operations with the reference on the CPU: both states, sizes with tails, and several tensors."""
    wrong = []
    cases: list[tuple[torch.dtype, tuple[int, ...]]] = [(dtype, (10_007,)) for dtype in DTYPES]
    for dtype, sizes in (*cases, (torch.float32, (10_007, 7, 600))):
        for state, step in [*STEPS.items(), *MIXED.items()]:
            sides = (kernels.half_step_for(device, state), device), (backends.REFERENCE.states[state].HalfStep, "cpu")
            results = [exercise(half_step, step, dtype, where, sizes) for half_step, where in sides]
            for (operation, got), (_, want) in zip(*results, strict=True):
                if not all(map(equal_bits, got, want)):
                    tensors = "" if len(sizes) == 1 else f" of {len(sizes)} tensors"
                    wrong.append(f"{operation} ({state} state{tensors}, f in {str(dtype).removeprefix('torch.')})")
                    break  # later operations start from a wrong state
    if not wrong:
        return Finding("bit-equal to the reference, every operation, dtype and state")
    remedy = backends.backend_for(device).repair
    fix = f"{remedy}, or set REVDEQ_BACKEND=reference: {wrong[0]} on {device} gives other bits than the reference"
    return Finding(f"different from the reference: {', '.join(wrong)}", fix, works=False)


def exercise(
    half_step: Any, step: Any, dtype: torch.dtype, device: Any, sizes: tuple[int, ...]
) -> Iterator[tuple[str, list[Tensor]]]:
    """Run all operations in sequence, past the first spill of the exact state, and yield the results of each."""
    leaves = [exercise_leaf(half_step, step, dtype, device, n) for n in sizes]
    while True:
        results = [result for leaf in leaves if (result := next(leaf, None))]
        if not results:
            return
        yield results[0][0], [x.to("cpu", copy=True) for _, left in results for x in left]


def exercise_leaf(
    half_step: Any, step: Any, dtype: torch.dtype, device: Any, n: int
) -> Iterator[tuple[str, list[Tensor]]]:
    """The same for one tensor of the state."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)
    f, initial, vjp, read = ((3 * torch.randn(n, generator=generator)).to(dtype).to(device) for _ in range(4))
    adjoint, other = (torch.randn(n, generator=generator).to(wide).to(device) for _ in range(2))
    copy, floor = torch.full((n,), torch.nan, dtype=dtype, device=device), torch.tensor(0.5, device=device)
    steps = 15
    if isinstance(step, Radix):
        assert steps >= step.free_half_steps + 2
        bound = half_step(reference_exact.encode(initial, step), copy, [step] * steps)
    else:
        bound = half_step(initial.double(), copy)
    calls: list[tuple[str, tuple[Any, ...]]] = [
        *[("relax", (f, read, step))] * (steps - 1),
        ("relax_norms", (vjp, read, step)),
        ("invert", (vjp, step)),
        *[("invert_adjoint", (f, adjoint, vjp, other, step, step))] * (steps - 2),
        ("invert_compare", (f, initial, floor, adjoint, vjp, other, step, step)),
    ]
    for name, arguments in calls:
        if name.startswith("invert") and step.c:
            copy.copy_(read)
        returned = getattr(bound, name)(*arguments)
        left = [bound.state, copy, adjoint, *([] if returned is None else [returned])]
        yield name, left


def equal_bits(a: Tensor, b: Tensor) -> bool:
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16}[a.element_size()]
    return torch.equal(a.view(integer), b.view(integer))


def same_gradient(device: torch.device) -> Finding:
    errors = {
        "float64": gradient_error(device, beta=0.5, max_steps=8, state="float64"),
        "exact": gradient_error(device, beta=0.8, max_steps=16, state="exact"),
    }
    text = (
        f"relative error against the stored graph: {errors['float64']:.1e} (float64 state), {errors['exact']:.1e} "
        "(exact state, with 24 fraction bits)"
    )
    numbers = {state: e if math.isfinite(e) else None for state, e in errors.items()}
    wrong = [state for state, e in errors.items() if not e <= GRADIENT_ERROR]  # NaN too
    if not wrong:
        return Finding(text, numbers=numbers)
    fix = f"do not train on {device}, whose gradient is wrong ({' and '.join(wrong)} state): report this output"
    return Finding(text, fix, works=False, numbers=numbers)


def gradient_error(device: torch.device, beta: float, max_steps: int, state: str) -> float:
    """The largest relative error of a gradient, compared with plain autograd through every evaluation of f."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    weight, x, seed = random(32, 32).div_(8).requires_grad_(), random(64, 32).requires_grad_(), random(64, 32)
    given: list[Tensor] = []

    def f(z: Tensor) -> Tensor:
        given.append(z.detach().clone())
        return nn.functional.linear(z, weight).tanh() + x

    solution = solve(f, torch.zeros_like(x), beta=beta, max_steps=max_steps, state=state, check="raise")
    evaluations = given[: solution.nfe]
    ours = torch.autograd.grad(solution.z, [x, weight], seed)

    y = z = torch.zeros_like(x, dtype=torch.float64)
    for z_given, y_given in zip(evaluations[::2], evaluations[1::2], strict=True):
        # The recorded inputs of f with the graph of the state: z - z.detach() is 0, but has a gradient.
        y = (1 - solution.beta) * y + solution.beta * f(z_given + (z - z.detach()).float()).double()
        z = (1 - solution.beta) * z + solution.beta * f(y_given + (y - y.detach()).float()).double()
    stored = torch.autograd.grad(z, [x, weight], seed.double())
    return max(((g - s).norm() / s.norm()).item() for g, s in zip(ours, stored, strict=True))


def bandwidth(device: torch.device) -> Finding:
    """The bytes per second of each half-step, compared with a copy. All tensors are zero and stay zero."""
    n = 2**22 if device.type == "cpu" else 2**25
    f, initial, copy, adjoint, vjp = (torch.zeros(n, device=device) for _ in range(5))
    floor = torch.ones((), device=device)
    source, target = (torch.zeros(3 * n, device=device) for _ in range(2))
    moved: dict[str, float] = {"copy": 24}  # bytes per element: reads and writes
    runs: dict[str, Callable[[], Any]] = {"copy": lambda: target.copy_(source)}
    for state, dtype in (("float64", torch.float64), ("exact", torch.int64)):
        step: Any = STEPS[state]
        zeros, settings = torch.zeros(n, dtype=dtype, device=device), ([step],) if state == "exact" else ()
        bound = kernels.half_step_for(device, state)(zeros, copy, *settings)
        back = adjoint, vjp, None, step, step
        operations: dict[str, tuple[float, tuple[Any, ...]]] = {  # the sums are small
            "relax": (24, (f, None, step)),
            "relax_norms": (24, (f, None, step)),
            "invert": (24, (f, step)),
            "invert_adjoint": (36, (f, *back)),
            "invert_compare": (28, (f, initial, floor, *back)),
        }

        def run(name: str, arguments: tuple[Any, ...], bound: Any = bound) -> None:
            bound.done = 1 if name.startswith("invert") else 0  # the position in the plan of the exact state
            getattr(bound, name)(*arguments)

        for name, (size, arguments) in operations.items():
            moved[f"{state} {name}"] = size
            runs[f"{state} {name}"] = functools.partial(run, name, arguments)
    times = take_turns(runs, device)
    rates = {name: n * size / times[name] for name, size in moved.items()}
    shares = {name: rate / rates["copy"] for name, rate in rates.items() if name != "copy"}
    slow = [name for name, share in shares.items() if share < ENOUGH]
    lines = [f"a copy moves {rates['copy'] / 1e9:.1f} GB/s; half-steps as a share of that (* is below {ENOUGH}):"]
    for state in ("float64", "exact"):
        ours = {name: share for name, share in shares.items() if name.startswith(state)}
        each = [f"{name.split()[1]} {share:.2f}{'*' * (name in slow)}" for name, share in ours.items()]
        lines.append(f"  {state + ':':<9}{', '.join(each)}")
    text = "\n".join(lines)
    return Finding(text, numbers={"bytes_per_second": rates, "below": slow})


def take_turns(runs: dict[str, Callable[[], Any]], device: torch.device) -> dict[str, float]:
    """Median seconds of each run. Runs are interleaved, so that other load slows all of them down alike."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    begin = time.perf_counter()
    while len(times["copy"]) < 7 and (len(times["copy"]) < 2 or time.perf_counter() < begin + 2):
        for name, call in runs.items():
            measure.synchronize(device)
            start = time.perf_counter()
            call()
            measure.synchronize(device)
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[1:]) for name, values in times.items()}  # the first may compile
