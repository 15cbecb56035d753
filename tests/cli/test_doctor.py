"""python -m revdeq doctor: its findings on healthy and broken machines."""

import builtins
import importlib
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import revdeq
from revdeq import __main__
from revdeq.cli import doctor
from revdeq.kernels import backends, cpu, reference, reference_exact


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["revdeq", "doctor", *arguments])
    return __main__.main()


@pytest.fixture(autouse=True)
def healthy(monkeypatch):
    """Without settings from the environment, and without timing, which one test below does."""
    monkeypatch.delenv("REVDEQ_BACKEND", raising=False)
    monkeypatch.setattr(doctor, "bandwidth", lambda device: doctor.Finding("not measured"))


def last_line(capsys):
    return capsys.readouterr().out.splitlines()[-1]


def test_a_healthy_machine_is_ready():
    """Called as users do: it prints one JSON object on stdout, and nothing else."""
    command = [sys.executable, "-m", "revdeq", "doctor", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    report = json.loads(result.stdout)
    assert report["ready"] and report["verdict"].startswith("ready")
    found = report["findings"]
    assert found["revdeq"]["numbers"]["torch"] == torch.__version__
    assert f" in {Path(revdeq.__file__).parent}, " in found["revdeq"]["text"]
    assert found["cpu backend"]["numbers"]["backend"] == ("reference" if cpu.library is None else "cpu")
    assert found["cpu bits"]["text"].startswith("bit-equal")
    assert 0 < max(found["cpu gradient"]["numbers"].values()) <= doctor.GRADIENT_ERROR
    rates = found["cpu bandwidth"]["numbers"]["bytes_per_second"]
    operations = ("relax", "relax_norms", "invert", "invert_adjoint", "invert_compare")
    assert rates.keys() == {"copy", *(f"{state} {name}" for state in ("float64", "exact") for name in operations)}
    assert min(rates.values()) > 0
    slow = [name for name, rate in rates.items() if rate < 0.8 * rates["copy"]]
    assert found["cpu bandwidth"]["numbers"]["below"] == slow


def test_a_healthy_machine_is_ready_in_text(monkeypatch, capsys):
    assert run(monkeypatch) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("ready")
    for about in ("revdeq", "triton", "C kernel", "GPU", "cpu", "cpu backend", "cpu bits", "cpu gradient"):
        assert any(line.startswith(f"{about:<18} ") for line in lines), about


@pytest.mark.parametrize(
    ("compiler", "found", "remedy"),
    [
        ("no-such-compiler", "there is no C compiler (no-such-compiler)", "install gcc or clang and reinstall revdeq"),
        ("false", "false fails", "repair the C compiler and reinstall revdeq"),
        ("true", "true can build it now", "reinstall revdeq"),
    ],
)
def test_without_the_c_kernel_it_is_ready_but_slow_and_says_why(monkeypatch, capsys, compiler, found, remedy):
    monkeypatch.setattr(cpu, "library", None)
    monkeypatch.setenv("CC", compiler)
    assert run(monkeypatch) == 0
    out = capsys.readouterr().out
    assert found in out
    assert "reference: PyTorch's own operations, because the C kernel was not built" in out
    assert out.splitlines()[-1].startswith(f"ready, and faster if you {remedy}")


def test_on_windows_the_remedy_is_another_compiler(monkeypatch):
    monkeypatch.setattr(doctor.sys, "platform", "win32")
    assert doctor.why_not_built()[1] == "install Microsoft C++ Build Tools and reinstall revdeq"


def test_a_c_kernel_that_cannot_be_loaded_is_only_advice(monkeypatch, capsys, tmp_path):
    """Built on another machine, or before cpu.c changed: the package imports, and warns."""
    with monkeypatch.context() as patch:
        (tmp_path / "broken.so").write_bytes(b"not a library")
        spec = importlib.util.spec_from_file_location("broken", tmp_path / "broken.so")
        patch.setattr(importlib.util, "find_spec", lambda name: spec)
        fresh = importlib.util.module_from_spec(cpu.__spec__)
        with pytest.warns(RuntimeWarning, match="C kernel cannot be loaded.*reinstall revdeq"):
            cpu.__spec__.loader.exec_module(fresh)
    assert fresh.library is None
    monkeypatch.setattr(cpu, "library", None)
    monkeypatch.setattr(cpu, "trouble", fresh.trouble)
    assert run(monkeypatch) == 0
    out = capsys.readouterr().out
    assert "missing: it cannot be loaded" in out and "broken.so" in out
    assert "reinstall revdeq" in out.splitlines()[-1]


def wrong_relax(self, f, read, step):
    reference.relax(self.state, f, read, self.copy, step)
    self.state[-1] = torch.nextafter(self.state[-1], self.state[-1] + 1)  # the last bit of the last element


@pytest.mark.skipif(cpu.library is None, reason="the C kernel was not built: no C compiler")
def test_one_wrong_bit_is_not_ready_and_names_the_operation(monkeypatch, capsys):
    monkeypatch.setattr(cpu.HalfStep, "relax", wrong_relax)
    assert run(monkeypatch, "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ready"]
    assert not report["findings"]["cpu bits"]["works"]
    assert report["findings"]["cpu gradient"]["works"]
    assert "not ready: rebuild the C kernel" in report["verdict"]
    assert "relax (float64 state, f in float32) on cpu gives other bits than the reference" in report["verdict"]


@pytest.mark.skipif(cpu.library is None, reason="the C kernel was not built: no C compiler")
def test_one_wrong_bit_in_one_of_several_tensors_is_found(monkeypatch):
    """By the check of states of several tensors."""
    right = cpu.HalfStep.relax
    monkeypatch.setattr(
        cpu.HalfStep, "relax", lambda self, *a: (wrong_relax if len(self.state) == 600 else right)(self, *a)
    )
    finding = doctor.same_bits(torch.device("cpu"))
    assert "relax (float64 state of 3 tensors, f in float32)" in finding.text


@pytest.mark.parametrize(
    "operation", ["_invert", *(pytest.param(name, marks=pytest.mark.full) for name in ("_relax", "invert_compare"))]
)
def test_a_wrong_exact_operation_is_found(monkeypatch, capsys, operation):
    monkeypatch.setattr(cpu, "library", None)
    right = getattr(reference_exact.HalfStep, operation)

    class Wrong(reference_exact.HalfStep):
        pass

    def off(self, *arguments):
        returned = right(self, *arguments)
        (self.state if returned is None else returned)[..., 5] ^= 1
        return returned

    setattr(Wrong, operation, off)
    chosen = doctor.kernels.half_step_for
    monkeypatch.setattr(
        doctor.kernels, "half_step_for", lambda device, state: Wrong if state == "exact" else chosen(device, state)
    )
    assert run(monkeypatch) == 1
    name = operation.removeprefix("_")
    assert f"{name} (exact state, f in float32) on cpu gives other bits" in last_line(capsys)


def test_a_wrong_gradient_is_not_ready(monkeypatch, capsys):
    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx, z):
            return z.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * (1 + 1e-5)

    solve = doctor.solve
    monkeypatch.setattr(
        doctor,
        "solve",
        lambda *args, **settings: (s := solve(*args, **settings)) and type(s)(**{**vars(s), "z": Off.apply(s.z)}),
    )
    assert run(monkeypatch) == 1
    assert "not ready: do not train on cpu, whose gradient is wrong (float64 and exact state)" in last_line(capsys)


def test_a_gradient_that_is_not_a_number_is_still_json(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "gradient_error", lambda *args, **settings: float("nan"))
    assert run(monkeypatch, "--json") == 1
    report = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert report["findings"]["cpu gradient"]["numbers"] == {"float64": None, "exact": None}


def test_an_impossible_setting_is_not_ready(monkeypatch, capsys):
    for value, message in (("cuda", "REVDEQ_BACKEND is 'cuda': expected"), ("triton", "cannot run on cpu tensors")):
        if value == "triton" and backends.gpu is None:
            message = "Triton is not installed"
        monkeypatch.setenv("REVDEQ_BACKEND", value)
        monkeypatch.setattr(doctor.measure, "devices", lambda: [torch.device("cpu")])
        assert run(monkeypatch) == 1
        line = last_line(capsys)
        assert line.startswith("not ready: correct REVDEQ_BACKEND") and message in line


@pytest.mark.skipif(backends.gpu is None, reason="Triton is not installed")
@pytest.mark.parametrize(("version", "slow"), [((3, 4), True), ((3, 5), False), ((3, 9), False), ((3, 10), True)])
def test_an_unknown_triton_is_reported_as_slow(monkeypatch, version, slow):
    monkeypatch.setattr("revdeq.kernels.launch._VERSION", version)
    finding = doctor.triton()
    words = "three times as much Python time as with 3.5 to 3.9"
    assert (words in finding.text) == slow
    assert finding.works and not finding.fix


def test_only_a_gpu_needs_triton(monkeypatch, capsys):
    monkeypatch.setitem(backends.TRITON.states, "float64", None)
    monkeypatch.setattr(doctor.measure, "devices", lambda: [torch.device("cpu")])
    load = importlib.import_module

    def missing(name, *rest, **named):
        if name in ("triton", "revdeq.kernels.gpu"):
            raise ModuleNotFoundError("No module named 'triton'")
        return load(name, *rest, **named)

    monkeypatch.setattr(importlib, "import_module", missing)
    assert run(monkeypatch) == 0
    assert "missing, needed on GPUs only (ModuleNotFoundError: No module named 'triton')" in capsys.readouterr().out
    finding = doctor.backend_for(torch.device("cuda", 0), main=True)
    assert finding.works and finding.fix == "install it with `pip install triton` (Linux)"
    assert "reference: PyTorch's own operations, because Triton is not installed" in finding.text


@pytest.mark.parametrize(
    "warning, remedy",
    [
        (
            "CUDA initialization: The NVIDIA driver on your system is too old (found version 12040). Please update",
            "not ready: install a torch that is built for CUDA 12.4 or older .*, or a driver for CUDA 13.0",
        ),
        (
            "CUDA initialization: Unexpected error from cudaGetDeviceCount()",
            "not ready: repair the GPU's driver .*cudaGetDeviceCount",
        ),
    ],
    ids=["too old", "broken"],
)
def test_a_driver_that_fails_is_a_finding(monkeypatch, capsys, warning, remedy):
    """torch warns, and reports that there is no GPU."""

    def failing():
        warnings.warn(warning, stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", failing)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert run(monkeypatch) == 1
    assert re.match(remedy, last_line(capsys))


def test_an_intel_gpu_is_counted(monkeypatch):
    monkeypatch.setattr(doctor.measure, "count", lambda kind: 2 if kind == "xpu" else 0)
    monkeypatch.setattr(torch.version, "xpu", "20250302", raising=False)
    assert "2, driver not found, torch is built for XPU 20250302" in doctor.gpu().text


def test_a_gpu_that_this_torch_is_not_built_for_is_advice(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "driver_version", lambda: "580.65")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert run(monkeypatch) == 0
    assert "install a torch that is built for your GPU" in last_line(capsys)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert run(monkeypatch) == 1
    assert "it is loaded, but torch finds no device" in last_line(capsys)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # on purpose
    assert run(monkeypatch) == 0


def test_whatever_fails_is_a_finding(monkeypatch, capsys):
    """A device that is listed, but fails in every operation."""

    def fails(*args, **kwargs):
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(doctor.measure, "devices", lambda: [torch.device("cuda", 0), torch.device("cpu")])
    for name in ("describe", "software", "same_bits", "same_gradient"):
        monkeypatch.setattr(doctor, name, fails)
    assert run(monkeypatch) == 1
    out = capsys.readouterr().out
    assert out.count("failed: RuntimeError: CUDA error: unspecified launch failure") == 7
    assert "repair what stopped the check of 'cuda:0 bits' (RuntimeError: CUDA error" in out.splitlines()[-1]


@pytest.mark.parametrize("option", [(), ("--json",)])
def test_an_interruption_ends_quietly(monkeypatch, capsys, option):
    def interrupted(device):
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "same_gradient", interrupted)
    assert run(monkeypatch, *option) == 130
    captured = capsys.readouterr()
    assert "Interrupted" in captured.err
    assert not option or captured.out == ""


def test_commands_are_imported_when_they_run(monkeypatch):
    load, imported = builtins.__import__, []
    monkeypatch.setattr(
        builtins, "__import__", lambda name, *rest: imported.append((name, rest[2])) or load(name, *rest)
    )
    monkeypatch.setattr(sys, "argv", ["revdeq", "--help"])
    with pytest.raises(SystemExit):
        __main__.main()
    assert not [names for _, names in imported if names and set(names) & {"demo", "doctor"}]
