"""Whether today's code trains as it did when the rows of evidence.py were written: the first updates of one training of
each variant are made once more.

A change in rounding changes no command, and is enough for a training to end like one with another seed. It shows in
the first losses already.
"""

import tempfile
from pathlib import Path

import torch
from evidence import STUDIES, Task, table, variants
from evidence_report import chosen

from revdeq.training.presets import configured
from revdeq.training.run import train


class Enough(Exception):
    """There is a first line of metrics."""


def check(results, folder, names):
    """Prints a line for each variant; returns how many are not reproduced, to the last bit."""
    curves, others = table(results / "curves.csv"), 0
    for name in names:
        rows = [row for row in table(results / "runs.csv") if row["study"] == name]
        shortest = {}
        for (label, updates), group, _ in chosen(rows):
            if label not in shortest or int(updates) < int(shortest[label]["updates"]):
                shortest[label] = next(row for row in group if row["seed"] == "0")
        for label, changes in variants(name):
            if label not in shortest:
                continue
            row = shortest[label]
            before = next(made for made in curves if made["run"] == row["run"])
            now = first_loss(Task(name, label, changes, float(row["lr"]), 0, int(row["updates"])), row, folder)
            off = abs(now - float(before["loss"])) / float(before["loss"])
            others += off > 0
            said = f"off by {off:.1e}: train it anew" if off else "the same"
            print(f"{name}, {label}: mean loss of {before['update']} updates {now:.7g}, {said}", flush=True)
    return others


def first_loss(task, row, folder):
    """Of a training with as many threads as the row's."""
    threads, found = torch.get_num_threads(), []

    def stop(metrics):
        found.append(metrics["loss"])
        raise Enough

    torch.set_num_threads(int(row["machine"].split()[-2]))
    try:
        with tempfile.TemporaryDirectory() as out:
            preset = configured(STUDIES[task.study].preset, task.settings)
            data = None if STUDIES[task.study].sizes else folder
            train(preset, data, Path(out), device="cpu", quiet=True, callback=stop)
    except Enough:
        pass
    finally:
        torch.set_num_threads(threads)
    return found[0]
