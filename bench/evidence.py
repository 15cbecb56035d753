"""Compares what models learn in many small trainings on two cores. Each is a row of a table, from which
evidence_report.py writes a page.

    python bench/evidence.py DIR --jobs 2          # all studies; DIR holds wikitext-2, gpt2 and CIFAR-10
    python bench/evidence.py --study maze          # puzzles need no data
    python bench/evidence.py DIR --equal-time      # again, with the same time for all
    python bench/evidence.py DIR --study language --updates 3000 --seeds 1 --minutes 60
    python bench/evidence.py --report              # only writes the page, from the existing rows
    python bench/evidence.py DIR --check           # does the current code still give the same losses, bit for bit?

To add a study, add an entry to STUDIES, and {its_name} to page.md where its table should be. Every variant is trained
with each learning rate, and with more if the best is at the end of the list; the other seeds and budgets use the best
one. Every training is a separate command, which is stored in its row. Run this again to resume after an interruption.
"""

import argparse
import collections
import csv
import dataclasses
import itertools
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from turns import one_thread, take_turns

from revdeq._device import peak_memory
from revdeq.models import count_parameters
from revdeq.training.data import load
from revdeq.training.evaluation import evaluate, loss_of
from revdeq.training.presets import PRESETS, configured
from revdeq.training.restore import restored
from revdeq.training.run import train

RESULTS = Path(__file__).parent / "results" / "evidence"
EDITION = 2
"""Increase this when the same command gives other numbers than before: rows of another edition are stale."""
PROBED = 200
"""Puzzles of each size that a model is evaluated on."""
Variants = dict[str, dict[str, Any]]


class Study(NamedTuple):
    """preset, updates, settings: shared by all trainings.

    variants: labels, each with the settings that make it. The first is the study's subject.
    rates: learning rates to choose from; if empty, that of the preset. The best is chosen on the validation set, for
        puzzles on larger ones than in training.
    seeds: the maximum number of seeds.
    clock: the variant whose training time all others get with --equal-time.
    size, sizes, depths: for puzzles, the setting for their size, and the sizes and numbers of steps to evaluate at.
    """

    preset: str
    updates: int
    settings: dict[str, Any]
    variants: Variants
    rates: tuple[float, ...] = ()
    seeds: int = 3
    clock: str = ""
    size: str = ""
    sizes: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()


EIGHT, FIVE = "reversible, 8 evaluations", "reversible, 5 evaluations per scale"
# The explicit networks have as many parameters as the equilibrium (hidden, channels), or one block for each of its
# evaluations of f in an update (depth, with the same channels).
LANGUAGE: Variants = {
    "reversible, 2 evaluations": {"max_steps": 1},
    "reversible, 4 evaluations": {"max_steps": 2},
    EIGHT: {"max_steps": 4},
    f"{EIGHT}, tuned every 100 updates": {"max_steps": 4, "tune_every": 100},
    "reversible, norms after the residual paths, 8 evaluations": {"max_steps": 4, "form": "residual"},
    "reversible, equation 7 as printed, 8 evaluations": {"max_steps": 4, "form": "paper"},
    "torchdeq, 12 evaluations": {"solver": "torchdeq", "evaluations": 12},
    "transformer, 1 layer": {"model": "transformer", "depth": 1, "hidden": 511},
    "transformer, 2 layers": {"model": "transformer", "depth": 2, "hidden": 127},
}
IMAGE: Variants = {
    "reversible, 3 evaluations per scale": {},
    FIVE: {"max_steps": (1, 4, 4, 1)},
    f"{FIVE}, tuned every 100 updates": {"max_steps": (1, 4, 4, 1), "tune_every": 100},
    "torchdeq, 15 evaluations per scale": {"solver": "torchdeq", "evaluations": 15},
    "ResNet, the same channels": {"model": "resnet", "depth": 2},
    "ResNet, one block per scale": {"model": "resnet", "channels": (12, 24, 48, 97), "depth": 1},
}
STATES: Variants = {
    "float64 state": {},
    "exact state": {"state": "exact"},
    "stored graph": {"solver": "stored"},
    # Shows how far differences as small as rounding errors grow.
    "stored graph, weight decay 0.1 % larger": {"solver": "stored", "weight_decay": 1.001e-4},
}


def puzzle(drawn: str, channels: int) -> Variants:
    """drawn: the preset's numbers of steps, 12 on average. channels: those that give an explicit network as many
    parameters."""
    return {
        f"exact gradient, N = {drawn}": {},
        "exact gradient, N = 12": {"max_steps": 12},
        "implicit gradient, N = 12": {"max_steps": 12, "gradient": "implicit"},
        "gradient of the last 3 steps, N = 12": {"max_steps": 12, "backward_steps": 3},
        "gradient of the last step, N = 12": {"max_steps": 12, "backward_steps": 1},
        "torchdeq, implicit gradient": {"solver": "torchdeq"},
        "torchdeq, implicit gradient, 40 evaluations": {"solver": "torchdeq", "evaluations": 40},
        "no equilibrium, 24 blocks, the same parameters": {"model": "puzzle-net", "depth": 24, "channels": channels},
        "no equilibrium, 24 blocks, the same compute": {"model": "puzzle-net", "depth": 24},
    }


PREFIX = {**puzzle("5 to 20", 10), "exact gradient, N = 5 to 20, always from z = 0": {"noise": 0.0}}
MAZE = puzzle("6 to 18", 7)
for of in ("exact gradient, N = 6 to 18", "gradient of the last 3 steps, N = 12", "gradient of the last step, N = 12"):
    MAZE[f"{of}, random paths in training"] = {**MAZE[of], "longest_of": 1}

STUDIES = {
    # 300,000 tokens; a quarter of the validation set
    "language": Study(
        "wikitext2-tiny", 300, {"batch": 16, "vocabulary": 4096, "evaluation_batches": 64, "evaluate_every": 250},
        LANGUAGE, rates=(3e-3, 6e-3, 1.2e-2), clock=EIGHT,
    ),
    "image": Study(
        "cifar10-tiny", 312, {"evaluate_every": 156}, IMAGE,
        rates=(3e-3, 6e-3, 1.2e-2), clock="reversible, 3 evaluations per scale",
    ),
    "states": Study("cifar10-tiny", 390, {"evaluate_every": 390, "log_every": 1}, STATES, seeds=1),
    "prefix": Study(
        "prefix-tiny", 500, {}, PREFIX, rates=(4e-3, 2e-3, 8e-3),
        size="bits", sizes=(16, 32, 64, 128), depths=(5, 10, 20, 40, 80, 160),
    ),
    "maze": Study(
        "maze-tiny", 2000, {}, MAZE, rates=(3e-3, 1.5e-3, 6e-3),
        size="cells", sizes=(4, 6, 8, 12), depths=(4, 8, 16, 32, 64, 128),
    ),
}  # fmt: skip


class Task(NamedTuple):
    study: str
    label: str
    lr: float
    seed: int
    updates: int

    @classmethod
    def of(cls, row):
        return cls(row["study"], row["label"], float(row["lr"]), int(row["seed"]), int(row["updates"]))

    @property
    def name(self) -> str:
        words = f"{self.study} {self.label} {self.lr} {self.updates} {self.seed}"
        return "".join(c if c.isalnum() else "-" for c in words)

    @property
    def settings(self) -> dict[str, Any]:
        """The changes to the preset."""
        own = {"lr": self.lr, "seed": self.seed, "updates": self.updates, "epochs": 10**6}
        return {**STUDIES[self.study].settings, **STUDIES[self.study].variants[self.label], **own}

    def command(self, folder: Path | str | None = "DIR", out: Path | str = "runs") -> list[str]:
        study = STUDIES[self.study]
        words = ["-m", "revdeq", "train", study.preset, "--out", f"{out}/{self.name}", "--resume"]
        words += [] if study.sizes else ["--data", str(folder)]
        return words + [w for key, value in self.settings.items() for w in ("--set", f"{key}={value}".replace(" ", ""))]


# Which trainings to run, and which were the best


def tasks(names, seeds, budgets, rows):
    """The trainings to run. Seeds are the outer loop, so that all variants have been trained equally often when time
    runs out. budgets: updates by study and label, if they are not the study's."""
    for seed, name in itertools.product(range(seeds), names):
        study = STUDIES[name]
        for label in study.variants if seed < study.seeds else ():
            first = Task(name, label, 0.0, 0, study.updates)
            best, rates = search(first, rows)
            updates = budgets.get((name, label), study.updates)
            if seed == 0 and updates == study.updates:
                yield from (first._replace(lr=lr) for lr in rates)
            elif best is not None:
                yield Task(name, label, best, seed, updates)


def search(task, rows):
    """The best learning rate at seed 0, or None if it is not known yet; and the rates to try."""
    study = STUDIES[task.study]
    scores = {Task.of(row).lr: goodness(row) for row in rows if Task.of(row)._replace(lr=0.0) == task}
    rates = study.rates or (PRESETS[study.preset].training.lr,)
    rates = (*rates, *(lr for lr in sorted(scores) if lr not in rates))
    while all(lr in scores for lr in rates):
        best = max(rates, key=scores.get)
        if len(rates) == 1 or min(rates) < best < max(rates):
            return best, rates
        rates = (*rates, best / 2 if best == min(rates) else best * 2)
    return None, rates


def goodness(row):
    return float(row["choice"]) * (-1 if row["metric"] == "perplexity" else 1)


def chosen(name, rows):
    """The rows of a study with the best learning rate, by label and updates, in the order of its variants. The best
    rate has the best mean over seeds, among those with the most seeds; ties go to the first in the list."""
    study, groups, best = STUDIES[name], collections.defaultdict(dict), {}
    for row in sorted((row for row in rows if row["study"] == name), key=lambda row: int(row["seed"])):
        groups[row["label"], int(row["updates"])].setdefault(float(row["lr"]), []).append(row)
    for key in sorted(groups, key=lambda key: (list(study.variants).index(key[0]), key[1])):
        most = max(map(len, groups[key].values()))
        rates = [lr for lr in (*study.rates, *groups[key]) if len(groups[key].get(lr, ())) == most]
        best[key] = groups[key][max(rates, key=lambda lr: statistics.mean(map(goodness, groups[key][lr])))]
    return best


def equal_time(name, speeds):
    """The updates that each variant can make, by study and label, in the time that the clock takes for the study's."""
    study = STUDIES[name]
    seconds = {row["label"]: float(row["seconds"]) for row in speeds if row["study"] == name}
    clock = seconds.get(study.clock)
    return {(name, label): round(study.updates * clock / each) for label, each in seconds.items()} if clock else {}


# Training and measuring


def measured(task, threads, folder, out):
    """The rows of each table for a training that has ended."""
    study = STUDIES[task.study]
    preset, data, model, _, last = restored(out / "last.pt", folder)
    test = evaluate(model, data, "test", dataclasses.replace(preset.training, evaluation_batches=None))
    final = last["rows"][-1]
    explicit = test.evaluations is None
    depths = (None,) if explicit else study.depths

    def solved(size, depth, split):
        changes = {study.size: size, "batch": 50, "evaluation_batches": PROBED // 50}
        if "evaluations" in task.settings:
            changes["evaluations"] = 2 * depth
        elif depth:
            changes["max_steps"] = depth
        trained = restored(out / "last.pt", folder, changes)
        return evaluate(trained.model, trained.dataset, split, trained.preset.training).metric

    row = {
        "run": f"{task.name} {int(time.time())}",
        "edition": EDITION,
        **task._asdict(),
        "parameters": count_parameters(model),
        "metric": data.metric.name,
        "validation": final["metric"],
        "choice": solved(study.sizes[-2], depths[-1], data.validation) if study.sizes else final["metric"],
        "test": test.metric,
        "best_validation": last["best"],
        "loss": final["loss"],
        "evaluations": "" if explicit else test.evaluations,
        "change": "" if test.change is None else test.change,
        "seconds": last["seconds"],
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {threads} threads",
        "command": shlex.join(["python", *task.command()]),
    }
    # Most curves keep only the evaluations and the first loss, which --check repeats.
    curve = [
        {"run": row["run"], **{key: made[key] for key in ("update", "loss", "evaluation_loss", "metric", "seconds")}}
        for i, made in enumerate(last["rows"])
        if "log_every" in study.settings or i == 0 or made["metric"] != ""
    ]
    probes = [
        {"run": row["run"], "size": size, "max_steps": depth or "", "solved": solved(size, depth, "test")}
        for size, depth in itertools.product(study.sizes, depths)
    ]
    return {"curves": curve, "probes": probes, "runs": [row]}  # runs last: a row means that the run is complete


def prepared(preset, folder=None):
    """A model to be trained, and a function that computes its loss on a batch."""
    data = load(preset.data, folder, preset.settings)
    model = preset.build(**data.shapes)
    batch = data.batch(torch.arange(preset.training.batch), torch.Generator().manual_seed(0))
    return model, lambda: loss_of(model(batch.inputs), batch.targets)


def memory(name):
    """The peak memory of an update at each number of steps, with the reversible solver and with a stored graph."""
    study = STUDIES[name]
    for solver, depth in itertools.product(("reversible", "stored"), study.depths):
        model, loss = prepared(PRESETS[study.preset].changed({"max_steps": depth, "solver": solver}))

        def update(model=model, loss=loss):
            torch.autograd.grad(loss(), list(model.parameters()))

        update()  # makes the allocations that happen only once
        yield {"study": name, "solver": solver, "max_steps": depth, "bytes": peak_memory(update)}


def speeds(name, folder, rounds=12):
    """The shortest processor time of an update of each variant, on one thread: other load, and threads that wait for
    each other, would affect variants differently."""
    study, updates, clock = STUDIES[name], {}, one_thread()
    for label, changes in study.variants.items():
        if "tune_every" in changes:
            continue  # its updates do not all take the same time
        model, loss = prepared(PRESETS[study.preset].changed({**study.settings, **changes}), folder)
        optimizer = torch.optim.AdamW(model.parameters())

        def update(loss=loss, optimizer=optimizer):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()

        updates[label] = update
    times = take_turns(updates, budget=0, rounds=(rounds, rounds), clock=clock)
    return [{"study": name, "label": label, "seconds": f"{min(each):.4g}"} for label, each in times.items()]


def check(results, folder, names):
    """Repeats the first updates of the shortest training of each variant; returns how many are not reproduced, to the
    last bit. A change in rounding is enough for a training to end like one with another seed."""
    first = {}
    for made in read(results, "curves"):
        first.setdefault(made["run"], made)
    others = 0
    for name in names:
        done = chosen(name, read(results, "runs"))
        for label in dict.fromkeys(label for label, _ in done):
            row = next(group[0] for key, group in done.items() if key[0] == label)
            before, now = float(first[row["run"]]["loss"]), first_loss(row, folder)
            off = abs(now - before) / before
            others += off > 0
            said = f"off by {off:.1e}: train it again" if off else "the same"
            print(f"{name}, {label}: mean loss of {first[row['run']]['update']} updates {now:.7g}, {said}", flush=True)
    return others


class Enough(Exception):
    """The first line of metrics has been recorded."""


def first_loss(row, folder):
    """The first loss of a training, with as many threads as the row's training had."""
    task, threads, found = Task.of(row), torch.get_num_threads(), []

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


# The tables, and the command line


def append(results, name, rows):
    """To runs.csv, curves.csv, probes.csv, memory.csv or speeds.csv."""
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"{name}.csv"
    new = not path.exists()
    with open(path, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def read(results, name):
    path = results / f"{name}.csv"
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines())) if path.exists() else []


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?", metavar="DIR", help="a folder with wikitext-2, gpt2 and CIFAR-10")
    parser.add_argument("--study", choices=STUDIES, action="append", help="one or more (default: all)")
    parser.add_argument("--label", action="append", help="only variants whose label starts with this")
    parser.add_argument("--seeds", type=int, default=3)
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--updates", type=int, help="updates of each training (default: the study's)")
    budget.add_argument("--equal-time", action="store_true", help="as many updates as the same time allows")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--jobs", type=int, default=1, help="trainings to run in parallel, which share the cores")
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: %(default)s")
    parser.add_argument("--runs", type=Path, default=Path("runs") / "evidence", help="default: %(default)s")
    parser.add_argument("--report", action="store_true", help="only write the page, from the existing rows")
    parser.add_argument("--check", action="store_true", help="only repeat the first updates of each variant")
    arguments = parser.parse_args()
    names, results = arguments.study or list(STUDIES), arguments.results
    if arguments.data is None and not arguments.report and any(not STUDIES[name].sizes for name in names):
        parser.error("DIR is missing: all studies but prefix and maze read data")
    if arguments.check:
        sys.exit(check(results, arguments.data, names))
    if not arguments.report:
        train_all(arguments, names)
    import evidence_report

    evidence_report.report(results)


def train_all(arguments, names):
    results, folder = arguments.results, arguments.data
    until, writing = time.monotonic() + 60 * arguments.minutes, threading.Lock()
    threads = max(1, torch.get_num_threads() // arguments.jobs)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}

    def train_and_measure(task):
        left = until - time.monotonic()
        if left <= 0:
            return
        print(f"{task.study}: {task.label}, lr {task.lr}, seed {task.seed}, {task.updates} updates", flush=True)
        words = [sys.executable, *task.command(folder, arguments.runs)]
        try:
            subprocess.run(words, env=environment, check=True, timeout=None if left == float("inf") else left)
        except subprocess.TimeoutExpired:
            print("out of time: run this again to resume")
            return
        made = measured(task, threads, folder, arguments.runs / task.name)
        with writing:
            for name, rows in made.items():
                if rows:
                    append(results, name, rows)

    budgets = {}
    for name in names:
        if arguments.updates is not None:
            budgets |= {(name, label): arguments.updates for label in STUDIES[name].variants}
        elif arguments.equal_time and STUDIES[name].clock:
            if not equal_time(name, read(results, "speeds")):
                append(results, "speeds", speeds(name, folder))
            budgets |= equal_time(name, read(results, "speeds"))
    while time.monotonic() < until:
        rows = read(results, "runs")
        known, begins = {Task.of(row) for row in rows}, tuple(arguments.label or [""])
        todo = [
            task
            for task in tasks(names, arguments.seeds, budgets, rows)
            if task not in known and task.label.startswith(begins)
        ]
        if not todo:
            break
        pool = ThreadPoolExecutor(arguments.jobs)
        try:
            list(pool.map(train_and_measure, todo))
        finally:
            pool.shutdown(cancel_futures=True)
    for name in {name for name in names if STUDIES[name].sizes} - {row["study"] for row in read(results, "memory")}:
        append(results, "memory", list(memory(name)))


if __name__ == "__main__":
    main()
