"""The examples run, each for a few updates; the first lines of their docstrings are listed."""

import importlib
import importlib.util
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import revdeq.examples
from revdeq.examples import recursive

NAMES = [path.stem for path in Path(revdeq.examples.__path__[0]).glob("*.py") if not path.stem.startswith("_")]
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")


@pytest.fixture
def printed(capsys, monkeypatch, device):
    """Runs an example, not on the simulated GPU of other tests. Returns the numbers in each line that it prints."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: device)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: device.type != "cpu")

    def run(name, **settings):
        example = importlib.import_module(f"revdeq.examples.{name}")
        example.main(**settings)
        lines = capsys.readouterr().out.splitlines()
        return [[float(n.replace(",", "")) for n in NUMBER.findall(line)] for line in lines]

    yield run
    torch.set_default_device(None)


def test_the_examples_are_listed_with_the_time_that_they_take():
    result = subprocess.run([sys.executable, "-W", "error", "-m", "revdeq.examples"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    listed = re.findall(r"^  (\w+) .*\. \(\d+ (?:s|min)\)$", result.stdout, re.MULTILINE)
    assert listed == sorted(NAMES)


def test_an_equilibrium_in_a_cnn_has_a_third_of_the_parameters(printed):
    pytest.importorskip("sklearn")
    (blocks, accuracy), (fewer, with_equilibrium) = printed("cnn", epochs=1)
    assert fewer < 0.4 * blocks
    assert min(accuracy, with_equilibrium) > 70


def test_inference_takes_more_steps_for_a_smaller_tolerance(printed):
    pytest.importorskip("sklearn")
    _, *rows, _, (warm, cold) = printed("inference")
    tol, mean, least, most, accuracy = zip(*rows, strict=True)
    assert tol == (0.1, 0.1, 1e-2, 1e-2, 1e-4, 1e-4)
    assert list(mean[::2]) == sorted(set(mean[::2])) and max(most) < 50 and warm < cold
    assert least[5] < mean[5] < most[5] and min(accuracy) > 85


def test_training_with_accelerate(printed):
    pytest.importorskip("sklearn")
    pytest.importorskip("accelerate")
    (_, first), (_, second), (accuracy,) = printed("with_accelerate", epochs=2)
    assert second < first and accuracy > 80


def test_a_looped_transformer_runs_with_any_number_of_steps(printed):
    assert [row[0] for row in printed("looped_transformer", updates=2)] == [1, 2, 4, 8]


def test_a_custom_looped_transformer_writes_the_same_with_caches(printed):
    *_, (cached, _), (whole, _) = printed("text", updates=30)
    assert cached == whole


def test_a_recursive_model_learns_and_halts(printed):
    """Learning to solve sudokus takes two minutes; a few updates distinguish clues from empty cells."""
    (update, loss, norm), (solved, count, segments) = printed("recursive", updates=40, batch=16, count=50)
    assert update == 40 and count == 50 and 0 <= solved <= 100
    assert loss < 0.95 * math.log(4)  # the loss of a guess; there is also that of the halting head
    assert 0 < norm < 100 and 1 <= segments <= recursive.Recursive.segments
