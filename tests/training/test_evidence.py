"""bench/evidence.py: which trainings to run, which rows are refused, and that the page says what the rows say."""

import argparse
import sys

import evidence
import pytest

from revdeq import __main__


def done(tasks, goodness=lambda task: 0.5):
    """The rows of these trainings."""
    given = {"metric": "accuracy", "validation": "0.5", "parameters": "9"}
    return [
        {
            **{key: str(value) for key, value in task._asdict().items()},
            **given,
            "run": task.name,
            "choice": str(goodness(task)),
            "command": evidence.shlex.join(["python", *task.command()]),
        }
        for task in tasks
    ]


def test_the_page_says_what_the_rows_say():
    """If rows or page.md have changed, run python bench/evidence.py --report."""
    page = evidence.RESULTS / "README.md"
    assert page.read_text(encoding="utf-8") == evidence.page(evidence.RESULTS)


def test_other_seeds_and_budgets_have_the_learning_rate_that_was_best():
    first = list(evidence.tasks(["image"], "ResNet", 3, None, []))
    assert {task.seed for task in first} == {0} and {task.lr for task in first} == {3e-3, 6e-3, 1.2e-2}
    rows = done(first, lambda task: 1 - abs(task.lr - 6e-3))
    later = list(evidence.tasks(["image"], "ResNet", 3, None, rows))
    assert {(task.lr, task.seed) for task in later} == {(6e-3, 1), (6e-3, 2)} and len(later) == 4
    longer = list(evidence.tasks(["image"], "ResNet", 1, 700, rows))
    assert [(task.lr, task.updates) for task in longer] == [(6e-3, 700)] * 2
    assert not list(evidence.tasks(["image"], "ResNet", 3, None, rows + done(later)))


@pytest.mark.parametrize("change", [{"label": "reversible, 7 evaluations"}, {"command": "python -m revdeq train"}])
def test_stale_rows_are_refused(change, tmp_path):
    rows = done([evidence.Task("image", "ResNet, the same channels", 3e-3, 0, 312)])
    evidence.append(tmp_path / "runs.csv", [rows[0] | change])
    with pytest.raises(ValueError, match="ResNet.*is stale"):
        evidence.Rows(tmp_path)


def run_here(monkeypatch, words):
    monkeypatch.setattr(sys, "argv", ["revdeq", *words])
    assert __main__.main() == 0


def test_a_study_is_trained_and_measured(monkeypatch, tmp_path):
    settings = {"channels": 4, "batch": 100, "log_every": 1, "evaluate_every": 2}
    variants = {"few": {"max_steps": 2}, "explicit": {"model": "puzzle-net", "depth": 2}}
    study = evidence.Study("prefix-tiny", 2, settings, variants, (1e-3,), size="bits", sizes=(4, 6), depths=(2, 3))
    monkeypatch.setitem(evidence.STUDIES, "tiny", study)
    monkeypatch.setattr(evidence, "PROBED", 50)
    # In this process: what the command does has other tests.
    monkeypatch.setattr(evidence.subprocess, "run", lambda words, **_: run_here(monkeypatch, words[3:]))
    given = {"results": tmp_path, "runs": tmp_path / "runs", "data": None, "seeds": 1, "jobs": 1, "updates": None}
    evidence.train_all(argparse.Namespace(**given, label=""), ["tiny"])
    rows = evidence.Rows(tmp_path)
    assert [row["label"] for row in rows.runs] == ["few", "explicit"] and float(rows.runs[0]["validation"]) <= 1
    assert len(rows.solved) == 2 * 2 + 2, "two sizes, with two numbers of steps or none"
    assert evidence.puzzle_table(rows, "tiny").count("%") >= 4 and "N = 3" in evidence.steps_table(rows, "tiny")
