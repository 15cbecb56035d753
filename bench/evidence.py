"""What models learn with the exact gradient: many small trainings on two cores, a row for each, and a page about them.

    python bench/evidence.py DIR --jobs 2          # all studies, in hours; DIR holds wikitext-2, gpt2 and CIFAR-10
    python bench/evidence.py --study maze          # puzzles need no data
    python bench/evidence.py DIR --study image --label ResNet --updates 700
    python bench/evidence.py --report              # only writes the page, from the existing rows

Every variant is trained with each learning rate; the other seeds and numbers of updates use the best one. Every
training is a command, which is stored in its row. Run this again to resume after an interruption. The page is page.md
with numbers from the rows in place of what is in braces: {maze} is the table of the study maze, {maze_steps} that of
its first variant by the number of steps, {scores} that of text and images, and the rest is in `facts`.
"""

import argparse
import collections
import csv
import dataclasses
import itertools
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from table import markdown

from revdeq import training
from revdeq.models import count_parameters

RESULTS = Path(__file__).parent / "results" / "evidence"
PROBED = 200
"""Puzzles of each size that a model is evaluated on."""
Variants = dict[str, dict[str, Any]]


class Study(NamedTuple):
    """preset, updates, settings: shared by all trainings.

    variants: labels, each with the settings that make it. The first is the study's subject.
    rates: learning rates to choose from, on the validation set; for puzzles on larger ones than in training.
    clock: the variant whose time the others get, in rows with other numbers of updates.
    size, sizes, depths: for puzzles, the setting for their size, and the sizes and numbers of steps to evaluate at.
    """

    preset: str
    updates: int
    settings: dict[str, Any]
    variants: Variants
    rates: tuple[float, ...]
    clock: str = ""
    size: str = ""
    sizes: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()


EIGHT = "reversible, 8 evaluations"
# The explicit networks have as many parameters as the equilibrium (hidden, channels), or one block for each of its
# evaluations of f in an update (depth, with the same channels).
LANGUAGE: Variants = {
    "reversible, 2 evaluations": {"max_steps": 1},
    "reversible, 4 evaluations": {"max_steps": 2},
    EIGHT: {"max_steps": 4},
    "reversible, norms after the residual paths, 8 evaluations": {"max_steps": 4, "form": "residual"},
    "reversible, equation 7 as printed, 8 evaluations": {"max_steps": 4, "form": "paper"},
    "torchdeq, 12 evaluations": {"solver": "torchdeq", "evaluations": 12},
    "transformer, 1 layer": {"model": "transformer", "depth": 1, "hidden": 511},
    "transformer, 2 layers": {"model": "transformer", "depth": 2, "hidden": 127},
}
IMAGE: Variants = {
    "reversible, 3 evaluations per scale": {},
    "reversible, 5 evaluations per scale": {"max_steps": (1, 4, 4, 1)},
    "torchdeq, 15 evaluations per scale": {"solver": "torchdeq", "evaluations": 15},
    "ResNet, the same channels": {"model": "resnet", "depth": 2},
    "ResNet, one block per scale": {"model": "resnet", "channels": (12, 24, 48, 97), "depth": 1},
}


def puzzle(drawn: str, channels: int) -> Variants:
    """drawn: the preset's numbers of steps, 12 on average. channels: those that give an explicit network as many
    parameters."""
    return {
        f"exact gradient, N = {drawn}": {},
        "exact gradient, N = 12": {"max_steps": 12},
        "implicit gradient, N = 12": {"max_steps": 12, "gradient": "implicit"},
        "torchdeq, implicit gradient": {"solver": "torchdeq"},
        "torchdeq, implicit gradient, 40 evaluations": {"solver": "torchdeq", "evaluations": 40},
        "no equilibrium, 24 blocks, the same parameters": {"model": "puzzle-net", "depth": 24, "channels": channels},
        "no equilibrium, 24 blocks, the same compute": {"model": "puzzle-net", "depth": 24},
    }


RANDOM = "exact gradient, N = 6 to 18, random paths in training"
STUDIES = {
    # 300,000 tokens; a quarter of the validation set
    "language": Study(
        "wikitext2-tiny", 300, {"batch": 16, "vocabulary": 4096, "evaluation_batches": 64, "evaluate_every": 250},
        LANGUAGE, (3e-3, 6e-3, 1.2e-2), EIGHT,
    ),
    "image": Study(
        "cifar10-tiny", 312, {"evaluate_every": 156}, IMAGE, (3e-3, 6e-3, 1.2e-2), "reversible, 3 evaluations per scale"
    ),
    "prefix": Study(
        "prefix-tiny", 500, {}, puzzle("5 to 20", 10), (4e-3, 2e-3, 8e-3),
        size="bits", sizes=(16, 32, 64, 128), depths=(5, 10, 20, 40, 80, 160),
    ),
    "maze": Study(
        "maze-tiny", 2000, {}, {**puzzle("6 to 18", 7), RANDOM: {"longest_of": 1}}, (3e-3, 1.5e-3, 6e-3),
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


# Training


def tasks(names, labels, seeds, updates, rows):
    """The trainings to run that can be run now: the best learning rate is known when all have been tried."""
    known = set(map(Task.of, rows))
    for seed, name in itertools.product(range(seeds), names):
        study = STUDIES[name]
        for label in (label for label in study.variants if label.startswith(labels)):
            tried = [Task(name, label, lr, 0, study.updates) for lr in study.rates]
            if left := [task for task in tried if task not in known]:
                yield from left if seed == 0 else ()
                continue
            best = max((row for row in rows if Task.of(row)._replace(lr=0) == tried[0]._replace(lr=0)), key=goodness)
            task = Task(name, label, float(best["lr"]), seed, updates or study.updates)
            if task not in known:
                yield task


def goodness(row):
    return float(row["choice"]) * (-1 if row["metric"] == "perplexity" else 1)


def measured(task, folder, out):
    """The row and the probes of a training that has ended."""
    study = STUDIES[task.study]
    found = training.restored(out / "last.pt", folder)
    final = list(csv.DictReader((out / "metrics.csv").read_text(encoding="utf-8").splitlines()))[-1]
    everything = dataclasses.replace(found.preset.training, evaluation_batches=None)
    test = training.evaluate(found.model, found.dataset, "test", everything)
    depths = (None,) if test.evaluations is None else study.depths

    def solved(size, depth, split):
        changes = {study.size: size, "batch": 50, "evaluation_batches": PROBED // 50}
        if depth and "evaluations" in task.settings:
            changes["evaluations"] = 2 * depth
        elif depth:
            changes["max_steps"] = depth
        changed = training.restored(out / "last.pt", folder, changes)
        return training.evaluate(changed.model, changed.dataset, split, changed.preset.training).metric

    larger = solved(study.sizes[-2], depths[-1], "valid") if study.sizes else final["metric"]
    row = {
        "run": task.name,
        **task._asdict(),
        "parameters": count_parameters(found.model),
        "metric": found.dataset.metric.name,
        "validation": final["metric"],
        "choice": larger,
        "test": test.metric,
        "evaluations": "" if test.evaluations is None else test.evaluations,
        "seconds": final["seconds"],
        "torch": torch.__version__,
        "machine": platform.machine(),
        "command": shlex.join(["python", *task.command()]),
    }
    probes = [
        {"run": task.name, "size": size, "max_steps": depth or "", "solved": solved(size, depth, "test")}
        for size, depth in itertools.product(study.sizes, depths)
    ]
    return row, probes


def train_all(arguments, names):
    results, runs, folder, writing = arguments.results, arguments.runs, arguments.data, threading.Lock()
    threads = max(1, torch.get_num_threads() // arguments.jobs)

    def train(task):
        print(*task, sep=", ", flush=True)
        words = [sys.executable, *task.command(folder, runs)]
        subprocess.run(words, env={**os.environ, "OMP_NUM_THREADS": str(threads)}, check=True)
        row, probes = measured(task, folder, runs / task.name)
        with writing:
            append(results / "probes.csv", probes)
            append(results / "runs.csv", [row])  # last: a row means that the training is complete

    def left():
        return list(tasks(names, arguments.label, arguments.seeds, arguments.updates, read(results / "runs.csv")))

    while todo := left():
        with ThreadPoolExecutor(arguments.jobs) as pool:
            list(pool.map(train, todo))


def append(path, rows):
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def read(path):
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines())) if path.exists() else []


# The page


class Rows:
    """The rows of a folder. Raises if one is of a training that has another command by now."""

    def __init__(self, folder):
        self.runs = read(folder / "runs.csv")
        self.solved = {
            (probe["run"], int(probe["size"]), probe["max_steps"]): float(probe["solved"])
            for probe in read(folder / "probes.csv")
        }
        for row in self.runs:
            task = Task.of(row)
            gone = task.label not in STUDIES[task.study].variants
            if gone or row["command"] != shlex.join(["python", *task.command()]):
                raise ValueError(
                    f"{row['run']} is stale: its variant is gone or has other settings now; remove the row"
                )

    def best(self, name):
        """The rows with the best learning rate, by label and updates, in the order of the variants: the rate with the
        best mean over seeds, among those with the most seeds."""
        groups = collections.defaultdict(lambda: collections.defaultdict(list))
        for row in (row for row in self.runs if row["study"] == name):
            groups[row["label"], int(row["updates"])][float(row["lr"])].append(row)

        def quality(rows):
            is_usual = float(rows[0]["lr"]) == STUDIES[name].rates[0]
            return len(rows), statistics.mean(map(goodness, rows)), is_usual

        labels = list(STUDIES[name].variants)
        ordered = sorted(groups, key=lambda key: (labels.index(key[0]), key[1]))
        return {key: max(groups[key].values(), key=quality) for key in ordered}

    def shares(self, rows, size, depth):
        """The percentage of puzzles that each run solves. A network without steps has the same at every depth."""
        found = [self.solved.get((r["run"], size, str(depth)), self.solved.get((r["run"], size, ""))) for r in rows]
        return [round(100 * share, 3) for share in found]


def span(shares):
    """The range from the worst to the best, rounded outwards."""
    low, high = math.floor(min(shares)), math.ceil(max(shares))
    return f"{low} to {high} %" if low < high else f"{low} %"


def percent(shares):
    mean = f"{statistics.mean(shares):.0f} %"
    return mean if len(set(shares)) == 1 else f"{mean} ({span(shares).removesuffix(' %').replace(' to ', '–')})"


def scores(rows):
    return [float(row["validation"]) * (1 if row["metric"] == "perplexity" else 100) for row in rows]


def score(rows):
    """The mean over seeds, with their standard deviation."""
    values = scores(rows)
    return f"{statistics.mean(values):.1f}" + (f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else "")


def sized(study, size):
    return f"{size} x {size} cells" if study.size == "cells" else f"{size} {study.size}"


def puzzle_table(rows, name):
    """Solved puzzles of each size with the most steps."""
    study = STUDIES[name]
    header = [f"solved with N = {study.depths[-1]}", *(sized(study, size) for size in study.sizes)]
    lines = [
        [label, *(percent(rows.shares(group, size, study.depths[-1])) for size in study.sizes)]
        for (label, _), group in rows.best(name).items()
    ]
    return markdown(header, lines)


def steps_table(rows, name):
    """Puzzles of each size that the first variant solves, by the number of steps."""
    study, group = STUDIES[name], next(iter(rows.best(name).values()))
    lines = [[sized(study, k), *(percent(rows.shares(group, k, n)) for n in study.depths)] for k in study.sizes]
    return markdown(["solved", *(f"N = {n}" for n in study.depths)], lines)


def by_budget(rows, name):
    """By label: the rows with the study's updates, with as much time as the clock, and with the most updates."""
    study, best = STUDIES[name], rows.best(name)
    longest = max(updates for _, updates in best)
    found = {}
    for label in dict.fromkeys(label for label, _ in best):
        counts = {updates: group for (other, updates), group in best.items() if other == label}
        same, many = counts.pop(study.updates), counts.pop(longest, [])
        found[label] = same, same if label == study.clock else next(iter(counts.values()), []), many
    return found


def score_table(rows, titles):
    lines = []
    for name, title in titles.items():
        lines.append([f"**{title}**", "", f"*{STUDIES[name].updates} updates*", "", ""])
        for label, (same, timed, many) in by_budget(rows, name).items():
            at_the_time = f"{score(timed)} ({int(timed[0]['updates']):,})" if timed else ""
            cells = [f"{int(same[0]['parameters']):,}", score(same), at_the_time, score(many) if many else ""]
            lines.append([label, *cells])
    return markdown(["", "parameters", "equal updates", "equal time (updates)", "3,000 updates"], lines)


def facts(rows):
    """Of mazes: the largest with the most steps. Of text and images: the best of a family in the same time."""
    study = STUDIES["maze"]
    size, depth, first = study.sizes[-1], study.depths[-1], next(iter(study.variants))
    exact = [label for label in study.variants if label.startswith("exact")]
    of = {label: rows.shares(group, size, depth) for (label, _), group in rows.best("maze").items()}
    others = [row for row in rows.runs if row["study"] == "maze" and row["label"] not in exact]
    by_rate = collections.defaultdict(list)
    for row in (row for row in rows.runs if (row["study"], row["label"]) == ("maze", first)):
        by_rate[float(row["lr"])].append(row)
    at = {lr: rows.shares(group, size, depth) for lr, group in sorted(by_rate.items())}

    def best(name, family, choose):
        groups = [timed for label, (_, timed, _) in by_budget(rows, name).items() if label.startswith(family) and timed]
        return f"{choose(statistics.mean(scores(group)) for group in groups):.0f}"

    return {
        "usual": span(at[study.rates[0]]),
        "exact": span([share for label in exact if label != RANDOM for share in of[label]]),
        "rates": ", ".join(f"{percent(shares)} at {lr:g}" for lr, shares in at.items()),
        "others": f"{math.ceil(max(rows.shares(others, size, depth)))} %",
        "others_smaller": f"{math.ceil(max(rows.shares(others, study.sizes[-2], depth)))} %",
        "others_trained": len(others),
        "random": span(of[RANDOM]),
        "text_reversible": best("language", "reversible", min),
        "text_explicit": best("language", "transformer", min),
        "images_reversible": best("image", "reversible", max),
        "images_explicit": best("image", "ResNet", max),
        "rows": len(rows.runs),
    }


def picture(rows):
    """Solved mazes of the training's size, and of the largest: a bar for each variant, a point for each seed."""
    from matplotlib.figure import Figure

    study = STUDIES["maze"]
    groups = {label: group for (label, _), group in rows.best("maze").items() if label != RANDOM}
    figure = Figure(figsize=(12, 1.3 + 0.42 * len(groups)), layout="constrained")
    figure.suptitle("Trained on 4 x 4 cells, solved with N = 128 steps, % (points: seeds)")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, size in zip(panels, (study.sizes[0], study.sizes[-1]), strict=True):
        for i, (label, group) in enumerate(groups.items()):
            shares = rows.shares(group, size, study.depths[-1])
            mean = statistics.mean(shares)
            axes.barh(i, mean, 0.62, color="#1f6fb4" if label.startswith("exact") else "#8a8f98")
            axes.plot(shares, [i] * len(shares), ".", color="black", ms=4)
            axes.annotate(f"{mean:.0f} %", (max(shares), i), (6, 0), textcoords="offset points", va="center")
        axes.set(xlim=(0, 119), xticks=range(0, 101, 25), title=sized(study, size))
        axes.spines[["top", "right"]].set_visible(False)
    axes.set_yticks(range(len(groups)), groups)
    axes.invert_yaxis()
    return figure


def page(folder):
    rows = Rows(folder)
    titles = {"language": "text: validation perplexity", "image": "images: validation accuracy in %"}
    made = {**facts(rows), "scores": score_table(rows, titles)}
    made |= {name: puzzle_table(rows, name) for name in ("maze", "prefix")} | {"maze_steps": steps_table(rows, "maze")}
    return (folder / "page.md").read_text(encoding="utf-8").format_map(made)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?", metavar="DIR", help="a folder with wikitext-2, gpt2 and CIFAR-10")
    parser.add_argument("--study", choices=STUDIES, action="append", help="one or more (default: all)")
    parser.add_argument("--label", default="", help="only variants whose label starts with this")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, help="updates of each training (default: the study's)")
    parser.add_argument("--jobs", type=int, default=1, help="trainings to run in parallel, which share the cores")
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: %(default)s")
    parser.add_argument("--runs", type=Path, default=Path("runs") / "evidence", help="default: %(default)s")
    parser.add_argument("--report", action="store_true", help="only write the page, from the existing rows")
    arguments = parser.parse_args()
    names = arguments.study or list(STUDIES)
    if arguments.data is None and not arguments.report and any(not STUDIES[name].sizes for name in names):
        parser.error("DIR is missing: the studies language and image read data")
    if not arguments.report:
        train_all(arguments, names)
    (arguments.results / "README.md").write_text(page(arguments.results), encoding="utf-8")
    picture(Rows(arguments.results)).savefig(arguments.results / "transfer.png", dpi=110)


if __name__ == "__main__":
    main()
