"""The benchmarks measure what they say. (`make bench` measures.)"""

import json
import signal
import sys
import tarfile
from pathlib import Path

import convergence
import depth
import forty_lines
import gpu
import looped
import pages
import pytest
import test_update
import torch
from table import Results

import revdeq
from revdeq.models import ConvBlock

BENCH, PYTHON = Path(__file__).parent.parent / "bench", (sys.executable, "-c")


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)

    def forward(self, z, x):
        return torch.tanh(self.linear(z) + x)


@pytest.fixture
def f():
    torch.manual_seed(0)
    return Layer()


@pytest.mark.parametrize("beta", [0.5, 0.8])
def test_the_forty_lines_have_the_gradient_of_the_stored_graph(f, beta):
    z0, x, seed = torch.randn(3, 3, 6).unbind()
    inputs = [z0.requires_grad_(), x.requires_grad_(), *f.parameters()]
    expected = revdeq.baselines.stored_graph(f, z0, x, beta=beta, max_steps=6)
    found = forty_lines.solve(f, z0, x, beta, 6)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(*(torch.autograd.grad(z, inputs, seed) for z in (found, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "lowest", "highest"), [("revdeq", 1e-4, 1e30), ("revdeq, exact state", 0.0, 0.0)])
@pytest.mark.filterwarnings("ignore::revdeq.ReconstructionWarning")
def test_the_exact_state_is_reconstructed_at_any_depth(name, lowest, highest):
    torch.manual_seed(0)
    block, x, seed = ConvBlock(16), torch.randn(1, 16, 4, 4, requires_grad=True), torch.randn(1, 16, 4, 4)
    assert depth.reconstruction_error(depth.METHODS[name], 4, block, x, seed) == 0
    assert lowest <= depth.reconstruction_error(depth.METHODS[name], 64, block, x, seed) <= highest


@pytest.mark.parametrize("solver", ["ours", "anderson"])
@torch.no_grad()
def test_residuals_belong_to_their_number_of_evaluations(f, solver):
    pytest.importorskip("torchdeq")
    x = torch.randn(3, 6)
    method = convergence.Ours(f, beta=0.8) if solver == "ours" else convergence.Theirs(f, solver)
    z = method.solve(x, 6)
    assert convergence.relative(f(z, x), z) == pytest.approx(method.residuals(x)[6], rel=1e-2)


@pytest.mark.parametrize("others", [(0, 1), (5, 6), (7, 8)])
def test_methods_that_are_compared_have_the_same_loss(others):
    torch.manual_seed(0)
    model, z, x = looped.Looped(), *torch.randn(2, 1, 4, looped.WIDTH)
    methods, target = list(looped.METHODS.values()), torch.randint(looped.CLASSES, (1, 4))
    found = [looped.gradient(methods[i], 8, model, z, x, target) for i in others]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_half_step_that_is_wrong_is_not_timed(direction, monkeypatch):
    monkeypatch.setattr(test_update, "compiled", lambda function: function)
    case = test_update.Case(direction, "float32", 10)
    assert case.bytes_moved == {"forward": 24, "backward": 40}[direction] * 2**10
    assert set(test_update.providers(case)) == set(test_update.PROVIDERS)
    monkeypatch.setattr(test_update, f"in_place_{direction}", lambda y, f, *rest: y.mul_(0.5))
    with pytest.raises(AssertionError, match="unfused, in place is wrong"):
        test_update.providers(case)


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.name)
def test_the_numbers_of_the_pages_were_measured(page):
    text = page.read_text(encoding="utf-8")
    assert pages.filled(text, pages.quoted()) == text, "run python bench/pages.py"


def test_measurements_are_of_a_commit():
    rows = [row for path in pages.quoted().glob("*.csv") for row in Results(path).rows]
    assert not [row for row in rows if row.commit.endswith("-dirty")]


def test_a_part_that_fails_or_times_out_on_a_gpu_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    chosen = {
        "slow": ((*PYTHON, "import time; print('begun', flush=True); time.sleep(60)"), 2),
        "broken": ((*PYTHON, "raise SystemExit(3)"), 60),
        "fine": ((*PYTHON, "print('all is well')"), 60),
    }
    monkeypatch.setattr(gpu, "parts", lambda quick, out: chosen)
    monkeypatch.setattr(gpu, "device", lambda: ("Some GPU (80 GB)", True))
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(tmp_path)])
    assert gpu.main() == 1
    (archive,) = tmp_path.iterdir()
    assert archive.name.startswith("revdeq-some-gpu-80-gb-") and str(archive) in capsys.readouterr().out
    with tarfile.open(archive) as file:
        texts = {Path(m.name).name: file.extractfile(m).read().decode() for m in file.getmembers() if m.isfile()}
    assert (texts["slow.txt"], texts["fine.txt"]) == ("begun\n", "all is well\n")
    expected = {"slow": "stopped after 2 s", "broken": "failed with code 3", "fine": "passed"}
    assert json.loads(texts["summary.json"])["parts"] == expected


def test_the_last_line_says_whether_a_gpu_can_be_trusted(tmp_path):
    passed = {"doctor": "passed", "tests-gpu-only": "passed", "tests": "passed"}
    assert gpu.trusted(True, passed).startswith("yes")
    assert gpu.trusted(True, {**passed, "doctor": "failed with code 1"}).startswith("NO: doctor failed")
    assert gpu.trusted(False, passed) == "not known: torch finds no GPU here"
    named = [x for command, _ in gpu.parts(False, tmp_path).values() for x in command if x.startswith("tests/")]
    assert len(named) == 4 and all((BENCH.parent / name).exists() for name in named)
