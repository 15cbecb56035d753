"""bench/evidence.py: which trainings to run, which rows are refused, and that the page agrees with the rows."""

import argparse
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib", reason="needs revdeq[train]")

import evidence
import evidence_report

from revdeq.models import count_parameters
from revdeq.training.presets import PRESETS

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "evidence"


def done(tasks, goodness=lambda task: 0.5):
    """The rows of these trainings."""
    return [
        {
            **{key: str(value) for key, value in task._asdict().items()},
            "run": f"{task.name} {i}",
            "edition": str(evidence.EDITION),
            "machine": "x86_64, 1 threads",
            "metric": "accuracy",
            "choice": str(goodness(task)),
            "command": evidence.shlex.join(["python", *task.command()]),
        }
        for i, task in enumerate(tasks)
    ]


def near(best):
    return lambda task: 1 - abs(task.lr - best)


def test_the_page_says_what_the_rows_say():
    """If rows or page.md have changed, run python bench/evidence.py --report."""
    text, _ = evidence_report.page(RESULTS)
    assert (RESULTS / "README.md").read_text(encoding="utf-8") == text


def test_the_other_seeds_have_the_learning_rate_that_was_best():
    first = list(evidence.tasks(["image"], 3, {}, []))
    assert {task.seed for task in first} == {0} and {task.lr for task in first} == {3e-3, 6e-3, 1.2e-2}
    later = [task for task in evidence.tasks(["image"], 3, {}, done(first, near(6e-3))) if task.seed]
    assert {task.lr for task in later} == {6e-3} and len(later) == 2 * len(first) / 3
    assert {task.seed for task in evidence.tasks(["states"], 3, {}, [])} == {0}


def test_a_best_learning_rate_at_the_end_of_the_list_extends_it():
    task = next(evidence.tasks(["image"], 1, {}, []))._replace(lr=0.0)
    rates = evidence.STUDIES["image"].rates

    def searched(tried, best):
        return evidence.search(task, done([task._replace(lr=lr) for lr in tried], near(best)))

    assert searched([], 6e-3) == searched(rates[:2], 6e-3) == (None, rates)
    assert searched(rates, 6e-3) == (6e-3, rates)
    assert searched(rates, 2e-3) == (None, (*rates, 1.5e-3))
    assert searched((*rates, 1.5e-3), 2.5e-3) == (3e-3, (*rates, 1.5e-3))


def test_among_rates_with_equally_many_seeds_the_mean_decides():
    tasks = [evidence.Task("maze", "exact gradient, N = 12", lr, seed, 2000) for lr in (3e-3, 6e-3) for seed in (0, 1)]
    better = {tasks[0]: 0.9, tasks[1]: 0.1, tasks[2]: 0.7, tasks[3]: 0.7}
    (group,) = evidence.chosen("maze", done(tasks, better.get)).values()
    assert [row["lr"] for row in group] == ["0.006", "0.006"]
    (group,) = evidence.chosen("maze", done(tasks[:3], better.get)).values()  # fewer seeds do not count
    assert [row["lr"] for row in group] == ["0.003", "0.003"]


def test_with_equal_time_a_fast_model_makes_more_updates():
    *others, fast = evidence.STUDIES["image"].variants
    speeds = [{"study": "image", "label": label, "seconds": "0.5"} for label in others]
    budgets = evidence.equal_time("image", [*speeds, {"study": "image", "label": fast, "seconds": "0.1"}])
    assert fast not in {task.label for task in evidence.tasks(["image"], 1, budgets, [])}  # its best is not known yet
    rows = done(evidence.tasks(["image"], 1, {}, []), near(6e-3))
    (task,) = (task for task in evidence.tasks(["image"], 1, budgets, rows) if task.label == fast)
    assert (task.lr, task.updates) == (6e-3, 5 * 312)


@pytest.mark.parametrize(
    "change",
    [
        {"edition": "1"},
        {"label": "reversible, 7 evaluations"},
        {"command": "python -m revdeq train cifar10-tiny"},
        {"seed": "1"},
    ],
    ids=["another edition", "no such variant", "another command", "a training twice"],
)
def test_stale_rows_are_refused(change, tmp_path):
    rows = done([evidence.Task("image", "ResNet, the same channels", 3e-3, seed, 312) for seed in (0, 1)])
    assert not list(evidence_report.stale(rows))
    evidence.append(tmp_path, "runs", [rows[0] | change, rows[1]])
    with pytest.raises(SystemExit, match="ResNet"):
        evidence_report.Tables(tmp_path)


@pytest.fixture
def tiny(monkeypatch):
    settings = {"channels": 4, "batch": 100, "log_every": 1, "evaluate_every": 2}  # 500 puzzles are evaluated
    two = {"few": {"max_steps": 2}, "many": {"max_steps": 40}}
    study = evidence.Study("prefix-tiny", 2, settings, two, size="bits", sizes=(4, 6), depths=(2, 3))
    monkeypatch.setitem(evidence.STUDIES, "tiny", study)
    monkeypatch.setattr(evidence, "PROBED", 50)


@pytest.mark.full
def test_a_study_is_trained_measured_and_checked(tiny, tmp_path, capsys, monkeypatch):
    arguments = {"results": tmp_path, "runs": tmp_path / "runs", "data": None, "seeds": 1, "minutes": 9, "jobs": 2}
    asked = argparse.Namespace(**arguments, updates=None, equal_time=False, label=None)
    evidence.train_all(asked, ["tiny"])
    capsys.readouterr()
    evidence.train_all(asked, ["tiny"])
    assert "tiny: " not in capsys.readouterr().out, "all is done"
    tables = evidence_report.Tables(tmp_path)
    assert [row["label"] for row in sorted(tables.runs, key=lambda row: row["label"])] == ["few", "many"]
    page = evidence_report.puzzle_table(tables, "tiny") + evidence_report.steps_table(tables, "tiny")
    assert page.count("few") == page.count("many") == 1 and page.count("MiB") == 4
    assert evidence.check(tmp_path, None, ["tiny"]) == 0
    assert capsys.readouterr().out.count("the same") == 2
    monkeypatch.setitem(evidence.STUDIES["tiny"].settings, "channels", 5)
    assert evidence.check(tmp_path, None, ["tiny"]) == 2
    assert capsys.readouterr().out.count("train it again") == 2


def test_updates_are_timed(tiny):
    assert [row["label"] for row in evidence.speeds("tiny", None, rounds=2) if float(row["seconds"])] == ["few", "many"]


@pytest.mark.parametrize(
    ("study", "label", "shapes"),
    [
        ("language", "transformer, 1 layer", {"vocabulary": 4097}),
        ("language", "transformer, 2 layers", {"vocabulary": 4097}),
        ("image", "ResNet, the same channels", {}),
        ("image", "ResNet, one block per scale", {}),
        ("prefix", "no equilibrium, 24 blocks, the same parameters", {"features": 1, "dimensions": 1}),
        ("maze", "no equilibrium, 24 blocks, the same parameters", {"features": 3, "dimensions": 2}),
    ],
)
def test_explicit_networks_have_as_many_parameters(study, label, shapes):
    preset, variants = PRESETS[evidence.STUDIES[study].preset], evidence.STUDIES[study].variants
    ours = next(iter(variants.values()))
    with torch.device("meta"):
        counts = [count_parameters(preset.changed(changes).build(**shapes)) for changes in (ours, variants[label])]
    # Of 24 equal blocks, one channel more or less is a step of up to 25 %.
    assert abs(counts[1] / counts[0] - 1) < (0.01 if study in ("language", "image") else 0.1)
