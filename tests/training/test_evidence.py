"""The tables of bench/evidence.py: which trainings are left, and rows that are refused."""

import copy

import pytest

pytest.importorskip("matplotlib", reason="needs revdeq[train]")

import evidence
import evidence_check
import evidence_report


def done(tasks, validation=None):
    """Tables as after these trainings."""
    rows, curves, probes = [], [], []
    for i, task in enumerate(tasks):
        metric = str(validation(task) if validation else 0.5)
        row = dict.fromkeys(evidence.ROW, "1")
        row |= {**task.key, "run": f"{task.name} {i}", "edition": str(evidence.EDITION), "command": task.written}
        rows.append({**row, "metric": "accuracy", "validation": metric, "choice": metric, "test": metric})
        for update in (task.updates // 2, task.updates):
            curve = dict.fromkeys(evidence.CURVE, "1.0")
            curves.append({**curve, "run": row["run"], "update": str(update), "metric": metric})
        study = evidence.STUDIES[task.study]
        probes += [
            {"run": row["run"], "size": str(size), "max_steps": str(depth), "solved": "0.25"}
            for size in study.sizes
            for depth in study.depths
        ]
    return rows, curves, probes


def test_the_other_seeds_have_the_learning_rate_that_was_best():
    first = list(evidence.tasks(["image"], 3, {}, []))
    assert {task.seed for task in first} == {0} and {task.lr for task in first} == {3e-3, 6e-3, 1.2e-2}
    rows, *_ = done(first, lambda task: 1 - abs(task.lr - 6e-3))
    later = [task for task in evidence.tasks(["image"], 3, {}, rows) if task.seed]
    assert {task.lr for task in later} == {6e-3} and len(later) == 2 * len(first) / 3
    assert {task.seed for task in evidence.tasks(["states"], 3, {}, [])} == {0}


def test_a_rate_that_was_almost_the_best_gets_all_seeds_if_asked_and_the_mean_decides():
    first = list(evidence.tasks(["maze"], 3, {}, []))
    rows, *_ = done(first, lambda task: 0.9 - abs(task.lr - 3e-3))
    later = [task for task in evidence.tasks(["maze"], 3, {}, rows, also=[6e-3]) if task.seed]
    assert {task.lr for task in later} == {3e-3, 6e-3}
    better = done(later, lambda task: 0.9 - abs(task.lr - 6e-3))[0]
    assert {row["lr"] for _, group, _ in evidence_report.chosen(rows) for row in group} == {"0.003"}
    for _, group, tried in evidence_report.chosen(rows + better):
        assert [row["lr"] for row in group] == ["0.006"] * 3 and tried == 3
    one_more = [row for row in better if row["seed"] == "1" or row["lr"] == "0.003"]  # fewer seeds do not count
    assert {row["lr"] for _, group, _ in evidence_report.chosen(rows + one_more) for row in group} == {"0.003"}


def test_with_equal_time_a_fast_model_makes_more_updates_at_its_best_learning_rate(tmp_path):
    labels = [label for label, _ in evidence.variants("image")]
    speeds = [{"study": "image", "label": label, "seconds": "0.5"} for label in labels]
    speeds[-1]["seconds"] = "0.1"
    updates = evidence.equal_time("image", speeds)
    rows, curves, _ = done(list(evidence.tasks(["image"], 1, {}, [])), lambda task: 1 - abs(task.lr - 6e-3))
    assert not list(evidence.tasks(["image"], 1, updates, []))[3 * (len(labels) - 1) :]  # its best one is not known yet
    fast = [task for task in evidence.tasks(["image"], 1, updates, rows) if task.label == labels[-1]]
    assert [(task.lr, task.updates) for task in fast] == [(6e-3, 5 * 312)]
    again = done(fast)
    for name, columns, made in zip(
        ("runs", "curves", "speeds"),
        (evidence.ROW, evidence.CURVE, evidence.SPEED),
        (rows + again[0], curves + again[1], speeds),
        strict=True,
    ):
        evidence.append(tmp_path / f"{name}.csv", columns, made)
    evidence_report.report(tmp_path)
    same_updates, same_time = (tmp_path / "README.md").read_text().split('The time of 312 updates of "reversible')
    assert f"| {labels[-1]} | 1560 | 1 | 0.006 |" in same_time and "| 1560 |" not in same_updates


def test_updates_are_timed_and_their_memory_is_counted(monkeypatch):
    preset = evidence.PRESETS["prefix-tiny"].changed({"channels": 4, "batch": 2, "max_steps": 2})
    monkeypatch.setitem(evidence.PRESETS, "prefix-tiny", preset)
    two = (("fast", {}), ("slow", {"max_steps": 40}))
    study = evidence.STUDIES["prefix"]._replace(variants=lambda: two, depths=(2,))
    monkeypatch.setitem(evidence.STUDIES, "prefix", study)
    monkeypatch.setattr(evidence, "variants", lambda name: two)
    fast, slow = evidence.speeds("prefix", None, rounds=2)
    assert [fast["label"], slow["label"]] == ["fast", "slow"] and min(
        float(fast["seconds"]), float(slow["seconds"])
    ) > 0
    assert [row["solver"] for row in evidence.memory("prefix") if row["bytes"] > 0] == ["reversible", "stored"]


def test_a_report_of_whole_runs(tmp_path):
    tables = done(list(evidence.tasks(["image", "states", "prefix"], 1, {}, [])))
    assert not evidence_report.problems(*tables)
    for name, columns, rows in zip(
        ("runs", "curves", "probes"), (evidence.ROW, evidence.CURVE, evidence.PROBE), tables, strict=True
    ):
        evidence.append(tmp_path / f"{name}.csv", columns, rows)
    run = tmp_path / "runs" / "language-1"
    run.mkdir(parents=True)
    (run / "config.json").write_text('{"training": {"updates": 3000}}')
    (run / "metrics.csv").write_text("update,metric\n200,310.5\n220,\n")
    evidence_report.report(tmp_path, tmp_path / "runs")
    page = (tmp_path / "README.md").read_text()
    assert "- language-1: update 220 of 3,000, 310.5 on the validation set" in page
    assert "| 0.003 of 3 tried |" in page and "| N = 160 |" in page
    assert (tmp_path / "prefix.png").exists() and (tmp_path / "states.png").exists()


def twice(rows, curves, probes):
    rows.append({**rows[0], "run": "again"})
    curves += [{**made, "run": "again"} for made in curves if made["run"] == rows[0]["run"]]


def spliced(rows, curves, probes):
    curves.insert(1, {**curves[0], "update": "1"})


def cut_off(rows, curves, probes):
    del curves[1]


def of_another_run(rows, curves, probes):
    curves[1]["metric"] = "0.7"


def left_over(rows, curves, probes):
    probes.append({"run": "gone", "size": "16", "max_steps": "5", "solved": "1"})


def another_edition(rows, curves, probes):
    rows[0]["edition"] = "1"


def other_settings(rows, curves, probes):
    rows[0]["command"] = rows[0]["command"].replace("updates=312", "updates=312 --set beta=0.5")


def no_such_variant(rows, curves, probes):
    rows[0]["label"] = "reversible, 7 evaluations"


@pytest.mark.parametrize(
    "damage, message",
    [
        (twice, "has 2 rows: keep one run of it"),
        (spliced, "is spliced: its curve goes back in time"),
        (cut_off, "is spliced: its curve does not end where its row does"),
        (of_another_run, "is spliced: its curve does not end where its row does"),
        (left_over, "gone has no row"),
        (another_edition, "is stale: of edition 1"),
        (other_settings, "is stale: the command is now"),
        (no_such_variant, "is stale: there is no such variant any more"),
    ],
)
def test_rows_of_stale_or_spliced_runs_are_refused(damage, message, tmp_path):
    tables = copy.deepcopy(done(list(evidence.tasks(["image"], 1, {}, []))))
    damage(*tables)
    for name, columns, rows in zip(
        ("runs", "curves", "probes"), (evidence.ROW, evidence.CURVE, evidence.PROBE), tables, strict=True
    ):
        evidence.append(tmp_path / f"{name}.csv", columns, rows)
    with pytest.raises(SystemExit, match=message):
        evidence_report.report(tmp_path)
    assert not (tmp_path / "README.md").exists()


def test_a_learning_rate_at_the_end_of_the_list_makes_it_longer():
    task = next(evidence.tasks(["image"], 1, {}, []))
    rates = evidence.STUDIES["image"].rates

    def tried(lrs, best):
        return done([task._replace(lr=lr) for lr in lrs], lambda each: 1 - abs(each.lr - best))[0]

    assert evidence.search(task, rates, []) == (None, rates)
    assert evidence.search(task, rates, tried(rates[:2], 6e-3)) == (None, rates)
    assert evidence.search(task, rates, tried(rates, 6e-3)) == (6e-3, rates)
    assert evidence.search(task, rates, tried(rates, 2e-3)) == (None, (*rates, 1.5e-3))
    assert evidence.search(task, rates, tried((*rates, 1.5e-3), 2.5e-3)) == (3e-3, (*rates, 1.5e-3))
    assert evidence.search(task, rates, tried((*rates, 2.4e-2, 4.8e-2), 2.4e-2)) == (2.4e-2, (*rates, 2.4e-2, 4.8e-2))


def test_a_change_in_what_is_computed_is_found_in_the_first_losses(tmp_path, monkeypatch, capsys):
    preset = evidence.PRESETS["prefix-tiny"].changed({"channels": 4, "batch": 2, "max_steps": 2, "log_every": 2})
    monkeypatch.setitem(evidence.PRESETS, "prefix-tiny", preset)
    small = (("small", {}),)
    monkeypatch.setattr(evidence_check, "variants", lambda name: small)
    task = evidence.Task("prefix", "small", {}, 4e-3, 0, 8)
    (row,), (first, last), _ = done([task])
    row["machine"] = "x86_64, 1 threads"
    first["update"], first["loss"] = "2", str(evidence_check.first_loss(task, row, None))
    evidence.append(tmp_path / "runs.csv", evidence.ROW, [row])
    evidence.append(tmp_path / "curves.csv", evidence.CURVE, [first, last])
    assert evidence_check.check(tmp_path, None, ["prefix"]) == 0
    assert "prefix, small: mean loss of 2 updates " in (said := capsys.readouterr().out) and "the same" in said
    monkeypatch.setitem(evidence.PRESETS, "prefix-tiny", preset.changed({"weight_decay": 0.2}))
    assert evidence_check.check(tmp_path, None, ["prefix"]) == 1
    assert "train it anew" in capsys.readouterr().out
