"""The examples run as their docstrings say, and their claims hold."""

import dataclasses
import importlib
import importlib.util
import inspect
import json
import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import revdeq.examples
from revdeq.cli.demo import Digits
from revdeq.examples import _sudoku, ddp, recursive

FOLDER = Path(revdeq.examples.__path__[0])
NOTEBOOK = FOLDER / "rented_gpu.ipynb"
NAMES = [path.stem for path in Path(revdeq.examples.__path__[0]).glob("*.py") if not path.stem.startswith("_")]
NEED_NONE = ("looped_transformer", "recursive", "text")


def test_the_examples_are_listed():
    result = subprocess.run([sys.executable, "-W", "error", "-m", "revdeq.examples"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    listed = [line.split()[0] for line in result.stdout.splitlines() if line.startswith("  ")]
    assert listed == sorted([*NAMES, NOTEBOOK.name])
    assert "A notebook: revdeq on a rented GPU." in result.stdout
    assert "pip install scikit-learn torchdeq" in result.stdout


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NEED_NONE])
def test_an_example_names_the_packages_that_it_needs(monkeypatch, name):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(Path(revdeq.examples.__path__[0], f"{name}.py")), run_name="__main__")
    needed = ("sklearn, torchdeq", "scikit-learn torchdeq") if name == "swap_torchdeq" else ("sklearn", "scikit-learn")
    assert end.value.code == f"This example needs {needed[0]}: pip install {needed[1]}"


pytest.importorskip("sklearn", reason="scikit-learn is not installed")

NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?")


def run(example, *launcher):
    """The numbers in each line that an example prints."""
    command = [sys.executable, "-W", "error", *launcher, "-m", f"revdeq.examples.{example}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert result.returncode == 0, result.stderr
    return [[float(n.replace(",", "")) for n in NUMBER.findall(line)] for line in result.stdout.splitlines()]


def few_digits(load):
    digits = load()
    chosen = {name: getattr(digits, name)[:96] for name in ("images", "labels", "test_images", "test_labels")}
    return dataclasses.replace(digits, **chosen)


@pytest.mark.parametrize("name", ["autocast", "cnn", "inference", "looped_transformer", "swap_torchdeq", "text"])
def test_an_example_runs(name, monkeypatch, capsys):
    """A short run. Checking its claims takes minutes (pytest -m full)."""
    if name == "swap_torchdeq":
        pytest.importorskip("torchdeq", reason="torchdeq is not installed")
    load = Digits.load
    monkeypatch.setattr(Digits, "load", lambda *args: few_digits(load))
    example = importlib.import_module(f"revdeq.examples.{name}")
    main = inspect.signature(example.main)
    try:
        example.main(**({"updates": 2} if "updates" in main.parameters else {}))
    finally:
        torch.set_default_device(None)
    assert len(capsys.readouterr().out.splitlines()) >= 2


@pytest.mark.full
def test_an_equilibrium_in_a_cnn_has_a_third_of_the_parameters_and_is_about_as_accurate():
    (blocks, accuracy), (fewer, with_equilibrium) = run("cnn")
    assert fewer < 0.4 * blocks
    assert accuracy > 95
    assert with_equilibrium > 94


@pytest.mark.full
def test_swapping_the_solver_of_torchdeq_makes_the_gradient_exact():
    pytest.importorskip("torchdeq", reason="torchdeq is not installed")
    _, implicit, reversible, *_ = run("swap_torchdeq")
    assert min(implicit[0], reversible[0]) > 88
    assert reversible[2] < reversible[3] / 2
    assert reversible[1] == 2 * 16 + 1  # once more in the backward pass, and once for torchdeq's statistics
    assert implicit[-1] > 1e-3
    assert reversible[-1] < 1e-6


@pytest.mark.full
def test_a_looped_transformer_sorts_better_with_more_steps():
    *training, one, two, four, eight = run("looped_transformer")
    assert training[-1][1] < 0.2 * training[0][1]  # the loss
    assert [steps for steps, _ in (one, two, four, eight)] == [1, 2, 4, 8]
    assert four[1] > 85 and four[1] > one[1]


@pytest.mark.full
def test_a_custom_looped_transformer_writes_the_same_with_caches():
    *training, cached, whole = run("text")
    assert training[-1][1] < 0.2  # the loss
    assert cached[0] == whole[0] > 95


@pytest.mark.parametrize("bf16", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_recursive_model_learns_and_halts(bf16, capsys):
    """Learning to solve sudokus takes two minutes; a few updates distinguish clues from empty cells."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        solved = recursive.main(updates=40, batch=16, count=50, bf16=bf16)
    finally:
        torch.set_num_threads(threads)
        torch.set_default_device(None)
    training, last = capsys.readouterr().out.splitlines()
    update, loss, norm = map(float, NUMBER.findall(training))
    assert update == 40 and 0 <= solved <= 1
    assert loss < 0.95 * math.log(4)  # the loss of a guess; there is also that of the halting head
    assert 0 < norm < 100
    assert 1 <= float(NUMBER.findall(last)[-1]) <= recursive.Recursive().segments


def test_a_puzzle_has_one_solution_and_halts_alone():
    torch.manual_seed(0)
    solutions = _sudoku.grids()
    assert len(solutions) == len(set(map(tuple, solutions.tolist()))) == 288
    clues, answers = _sudoku.puzzles(20, solutions)
    assert len(clues) == 20 and ((clues > 0).sum(1) == _sudoku.CLUES).all()
    for clue, answer in zip(clues, answers, strict=True):
        fitting = solutions[((solutions == clue) | (clue == 0)).all(1)]
        assert fitting.tolist() == [answer.tolist()]
    model = recursive.Recursive()
    new, old = (model.fresh(clues[k : k + 2], answers[k : k + 2]) for k in (0, 2))
    old |= {"z": {k: v + 1 for k, v in old["z"].items()}, "segments": old["segments"] + 3}
    mixed = recursive.where(torch.tensor([True, False]), new, old)
    assert mixed["segments"].tolist() == [0, 3]
    for k, carry in enumerate((new, old)):
        assert torch.equal(mixed["clues"][k], carry["clues"][k])
        assert torch.equal(mixed["z"]["answer"][k], carry["z"]["answer"][k])


@pytest.mark.full
def test_a_model_is_tuned_in_bfloat16_from_a_checkpoint_in_float32():
    _, _, (before,), after = run("autocast")
    assert before < 30
    assert after[0] > 85


@pytest.mark.full
def test_inference_stops_at_the_tolerance_or_at_the_budget():
    lines = [line for line in run("inference") if line]
    table, each, (warm, cold) = lines[:4], lines[4:7], lines[7]
    for tol, _, mean, least, most, accuracy in each:
        assert 2 <= least <= mean <= most < 100 and accuracy > 85, tol
    assert each[2][3] < each[2][4]
    tol, budget, evaluations, residual, accuracy = zip(*table, strict=True)
    assert all(r < t for r, t in zip(residual[:3], tol[:3], strict=True))
    assert list(evaluations[:3]) == sorted(set(evaluations[:3])) and max(evaluations) < 2 * budget[0]
    assert evaluations[3] == 2 * budget[3] and residual[3] > tol[3]
    assert min(accuracy[:3]) > 85
    assert warm < cold


@pytest.mark.full
def test_the_notebook_runs_from_top_to_bottom(monkeypatch, capsys, tmp_path):
    """As Jupyter would run it, without Jupyter's own commands, and at the small size for a CPU."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed").use("Agg")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    namespace = {}
    for number, cell in enumerate(notebook["cells"]):
        assert cell["cell_type"] in ("markdown", "code")
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None  # no output of this machine is committed
            lines = ["\n" if line.startswith("%") else line for line in cell["source"]]
            exec(compile("".join(lines), f"cell {number}", "exec"), namespace)
    peaks = {name: [peak for peak, _ in values] for name, values in namespace["measurements"].items()}
    assert peaks["stored graph"][-1] > 10 * peaks["stored graph"][0]
    assert peaks["reversible"][-1] < 2 * peaks["reversible"][0]
    assert "8 x 8 cells, N = 64" in capsys.readouterr().out


def test_the_ddp_example_says_how_to_start_it():
    with pytest.raises(SystemExit, match="torchrun --nproc-per-node 2 -m revdeq.examples.ddp"):
        ddp.main()


@pytest.mark.full
def test_processes_under_torchrun_keep_equal_parameters():
    dist = pytest.importorskip("torch.distributed")
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs torch with gloo")
    (processes,), (accuracy,) = run("ddp", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert processes == 2
    assert accuracy > 90


@pytest.mark.full
def test_a_graph_network_is_accurate_with_enough_steps():
    _, _, _, *rows = run("graph")
    steps, hops, accuracy, memory = zip(*rows, strict=True)
    assert steps == (1, 2, 4, 8, 16)
    assert hops == tuple(2 * n for n in steps)
    assert accuracy[0] < 30
    assert min(accuracy[2:]) > 75
    assert memory[-1] < 1.3 * memory[0]  # the exact state spills some bytes
