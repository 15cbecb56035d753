"""What schedules and learnt coefficients are worth in training, with few evaluations of f.

    python bench/schedules.py DIR        # holds wikitext-2, gpt2 and CIFAR-10; 90 minutes of a core, can be interrupted
    python bench/schedules.py            # only prints the tables of the existing rows

constant: beta .8 and gamma 1, as in the presets. schedule: searched for every half-step, at the beginning and halfway
through. learnt: a pair for every half-step, parameters like all others. Each is trained with two learning rates and
three seeds; the tables have the rate with the better mean loss.
"""

import argparse
import collections
import csv
import itertools
import math
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

import revdeq
from revdeq.training.data import load
from revdeq.training.presets import PRESETS
from revdeq.training.run import Diverged

ROWS = Path(__file__).parent / "results" / "evidence" / "schedules.csv"
SEEDS = range(3)
COEFFICIENTS = ("constant", "schedule", "learnt")


class Study(NamedTuple):
    settings: dict
    updates: int
    evaluations: tuple[int, ...]
    rates: tuple[float, float]


TEXT = {"batch": 8, "length": 32, "vocabulary": 2048, "evaluation_batches": 64}
STUDIES = {
    "wikitext2-tiny": Study(TEXT, 150, (2, 4, 8), (3e-3, 6e-3)),
    "cifar10-tiny": Study({"batch": 16}, 100, (2, 4, 8), (3e-3, 6e-3)),
    # f reaches two bits further with every evaluation: 8 are just enough for 16 bits.
    "prefix-tiny": Study({}, 250, (8, 12, 16), (4e-3, 8e-3)),
}
SCALES = (1, None, None, 1)
"""Steps of the image model: only the two scales in the middle take more than one."""


def trainings():
    """All trainings, in order."""
    for name, study in STUDIES.items():
        for lr, seed, evaluations, kind in itertools.product(study.rates, SEEDS, study.evaluations, COEFFICIENTS):
            yield name, kind, evaluations, lr, seed


def key(row):
    return row["preset"], row["coefficients"], int(row["evaluations"]), float(row["lr"]), int(row["seed"])


def better(rows, name, kind, evaluations):
    """The rate with the smallest mean loss, among those with the most seeds: one seed is too noisy."""
    tried = collections.defaultdict(list)
    for row in rows:
        if key(row)[:3] == (name, kind, evaluations):
            tried[float(row["lr"])].append(float(row["loss"]))
    most = max(map(len, tried.values()), default=0)
    return min((lr for lr in tried if len(tried[lr]) == most), key=lambda lr: statistics.mean(tried[lr]), default=None)


def trained(data, name, kind, evaluations, lr, seed):
    chosen, updates, *_ = STUDIES[name]
    steps = evaluations // 2
    if name.startswith("cifar"):
        steps = tuple(n or steps for n in SCALES)
    preset = PRESETS[name].changed({**chosen, "max_steps": steps, "learn_coefficients": kind == "learnt"})
    kept = {key: getattr(preset.training, key) for key in ("weight_decay", "schedule", "clip", "evaluation_batches")}
    settings = {**kept, "batch": preset.training.batch, "warmup": updates // 6, "epochs": 10**6}
    if kind == "schedule":
        settings |= {"tune": "schedule", "tune_every": updates // 2}
    torch.manual_seed(seed)
    model = preset.build(**data.shapes)
    began = time.process_time()
    with tempfile.TemporaryDirectory() as out:
        try:
            made = revdeq.train(
                model, data, out, device="cpu", quiet=True,
                lr=lr, seed=seed, updates=updates, evaluate_every=updates, log_every=updates, **settings,
            )[-1]  # fmt: skip
        except Diverged:
            made = {"evaluation_loss": math.inf, "metric": data.metric.of(math.inf, 0.0), "residual": math.inf}
    return {
        "preset": name, "coefficients": kind, "evaluations": evaluations, "lr": lr, "seed": seed, "updates": updates,
        "loss": made["evaluation_loss"], "metric": made["metric"], "residual": made["residual"],
        "seconds": round(time.process_time() - began, 1),
    }  # fmt: skip


def read():
    return list(csv.DictReader(ROWS.read_text(encoding="utf-8").splitlines())) if ROWS.exists() else []


def append(row):
    new = not ROWS.exists()
    with open(ROWS, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def tables(rows):
    """In Markdown: the mean over the seeds, and their standard deviation; and the time of all updates."""
    lines = []
    for name, study in STUDIES.items():
        lines += ["", f"| {name} | " + " | ".join(f"{k} evaluations" for k in study.evaluations) + " |"]
        lines.append("|---" * (len(study.evaluations) + 1) + "|")
        for kind in COEFFICIENTS:
            cells = []
            for evaluations in study.evaluations:
                asked = name, kind, evaluations, better(rows, name, kind, evaluations)
                found = [row for row in rows if key(row)[:4] == asked]
                metric = [float(row["metric"]) * (1 if name.startswith("wiki") else 100) for row in found]
                spread = f" ± {statistics.stdev(metric):.1f}" if len(metric) > 1 else ""
                seconds = statistics.mean(float(row["seconds"]) for row in found) if found else 0
                cells.append(f"{statistics.mean(metric):.1f}{spread}, {seconds:.0f} s" if found else "")
            lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines[1:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?", metavar="DIR", help="with wikitext-2, gpt2 and CIFAR-10")
    folder = parser.parse_args().data
    if folder is not None:
        warnings.simplefilter("ignore", revdeq.ConvergenceWarning)  # expected with few evaluations
        torch.set_num_threads(1)
        presets = {name: PRESETS[name].changed(study.settings) for name, study in STUDIES.items()}
        sets = {name: load(preset.data, folder, preset.settings) for name, preset in presets.items()}
        while todo := next((t for t in trainings() if t not in set(map(key, read()))), None):
            row = trained(sets[todo[0]], *todo)
            append(row)
            print(*row.values(), flush=True)
    print(tables(read()))


if __name__ == "__main__":
    main()
