"""python -m revdeq: its two commands that need no data, and how it ends."""

import contextlib
import sys

import pytest
import torch

from revdeq import __main__
from revdeq.cli import doctor


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["revdeq", *arguments])
    return __main__.main()


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.delenv("REVDEQ_BACKEND", raising=False)
    monkeypatch.setattr(doctor._device, "devices", lambda: [torch.device("cpu")])


def test_a_healthy_machine_is_ready(monkeypatch, capsys):
    assert run(monkeypatch, "doctor") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "ready"
    assert any("the bits of the reference, for every dtype and state" in line for line in lines)


@pytest.mark.parametrize(
    ("backend", "message"),
    [("cuda", "REVDEQ_BACKEND is 'cuda': expected"), ("triton", "backend 'triton' is forced, but")],
)
def test_kernels_that_cannot_run_are_not_ready(monkeypatch, capsys, backend, message):
    monkeypatch.setenv("REVDEQ_BACKEND", backend)
    assert run(monkeypatch, "doctor") == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"not ready: cpu cannot be used: {message}")


@pytest.mark.parametrize("position", [0, 3, -1])
def test_one_wrong_bit_is_not_ready(monkeypatch, capsys, position):
    """In the solution, in a gradient of the first tensor, and in one of the last."""
    by_reference, right = [], doctor.solved

    @contextlib.contextmanager
    def reference(name):
        by_reference.append(name)
        yield
        by_reference.pop()

    def wrong(method, *arguments, **options):
        found = right(method, *arguments, **options)
        if method is doctor.solve and not by_reference:
            found[position].view(torch.uint8)[-1] ^= 1
        return found

    monkeypatch.setattr(doctor, "backend", reference)
    monkeypatch.setattr(doctor, "solved", wrong)
    assert run(monkeypatch, "doctor") == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("not ready: ") and "or set REVDEQ_BACKEND=reference: " in last and "other bits" in last


@pytest.mark.parametrize("factor", [1 + 1e-5, float("nan")])
def test_a_wrong_gradient_is_not_ready(monkeypatch, capsys, factor):
    stored = doctor.stored_graph
    monkeypatch.setattr(doctor, "stored_graph", lambda *a, **options: [factor * z for z in stored(*a, **options)])
    assert run(monkeypatch, "doctor") == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("not ready: do not train on cpu")


def test_the_demo_measures_costs_and_trains(monkeypatch, capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from revdeq.cli import demo

    for name, value in {"DEPTHS": (1, 16), "SOLVED_DEPTHS": (2, 20), "UPDATES": 2, "BITS": 8}.items():
        monkeypatch.setattr(demo, name, value)
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "demo") == 0
    rows = {line[:32].strip(): line[32:].split() for line in capsys.readouterr().out.splitlines() if line.strip()}
    shallow, deep = map(float, rows["stored graph"])
    assert deep > 5 * shallow
    shallow, deep = map(float, rows["revdeq, float64 state"])
    assert deep < 1.1 * shallow
    assert rows["exact state, beta .8"] == ["0e+00", "0e+00"]
    assert float(rows["float64 state, beta .8"][1]) > 0  # of the 24 bits that f reads, some are lost
    assert all(share.endswith("%") for length in (8, 16, 32) for share in rows[f"{length} bits"])
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_package_is_named_with_its_remedy(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "revdeq.cli.demo", raising=False)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert run(monkeypatch, "demo") == 1
    message = capsys.readouterr().err
    assert "tqdm" in message and "pip install matplotlib" in message
