"""What the models learn at a size for two cores: many small trainings, one row each, of which evidence_report.py makes
tables and plots.

    python bench/evidence.py DIR --jobs 2              # all studies, until they are done, two trainings at a time
    python bench/evidence.py DIR --study language --updates 3000 --seeds 1 --minutes 60
    python bench/evidence.py DIR --equal-time          # once more with the time, not the updates, the same for all
    python bench/evidence.py --study prefix            # puzzles need no data
    python bench/evidence.py --report                  # tables and plots of the rows there are, and what is missing
    python bench/evidence.py DIR --check               # whether today's code still trains like that

language  perplexity on WikiText-2 against evaluations of f, beside the classical equilibrium model (torchdeq, with the
          implicit function theorem) and transformers with as many parameters
image     accuracy on CIFAR-10 of the reversible and the classical model, of a ResNet with the same channels and of one
          with as many parameters
states    the same training with the float64 state, the exact state and the stored graph: loss curves
prefix    prefix sums: strings that are solved against their length and the number of steps
maze      mazes: those that are solved against their size and the number of steps

A study with several learning rates trains every variant with each of them, and with more if the best is at the end of
the list; and the other seeds and other budgets with the best one. Where seed 0 could not tell two rates apart, --rate
trains the seeds of the other one, too, and the mean decides.
Every training is a command of its own, which the table of rows holds. What was interrupted, or ran out of --minutes,
goes on where it was when this is called again.
"""

import argparse
import csv
import dataclasses
import functools
import itertools
import os
import platform
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from turns import one_thread, take_turns

from revdeq._device import peak_memory
from revdeq.models import PuzzleNet, ResNet, Transformer, count_parameters
from revdeq.training.data import load
from revdeq.training.evaluation import evaluate, loss_of
from revdeq.training.presets import PRESETS
from revdeq.training.restore import restored

HERE = Path(__file__).parent
EDITION = 2
"""Raised when the same command gives other numbers than before: rows of another edition are stale."""
ROW = (
    "run", "edition", "study", "label", "lr", "seed", "updates", "parameters", "metric", "validation", "choice", "test",
    "best_validation", "loss", "evaluations", "residual", "seconds", "torch", "machine", "command",
)  # fmt: skip
CURVE = ("run", "update", "loss", "evaluation_loss", "metric", "seconds")
MEMORY = ("study", "solver", "max_steps", "bytes")
PROBE = ("run", "size", "max_steps", "solved")
SPEED = ("study", "label", "seconds")
Changes = dict[str, Any]


class Study(NamedTuple):
    """preset, updates, settings: of all its trainings.

    variants: labels, each with the settings that make it.
    rates: learning rates to choose from, the first of those that are equally good; none: that of the preset. If the
        smallest or the largest is the best, half of it or twice as much is tried, too. For puzzles it is the best on
        larger ones than it was trained on, of the validation set: those of the training's size are solved at any rate.
    seeds: at most so many.
    clock: the variant whose training all others get the time of, with --equal-time.
    size, sizes, depths: of puzzles, the setting for their size, and the sizes and numbers of steps to evaluate at.
    """

    preset: str
    updates: int
    settings: Changes
    variants: Callable[[], Iterator[tuple[str, Changes]]]
    rates: tuple[float, ...] = ()
    seeds: int = 3
    clock: str = ""
    size: str = ""
    sizes: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()


TUNED = "beta and gamma tuned anew every 100 updates"


def language_variants():
    shape = {"vocabulary": 4097, **{k: PRESETS["wikitext2-tiny"].settings[k] for k in ("d", "heads", "length")}}
    with torch.device("meta"):
        # With one norm less, 256 of 730,000 parameters.
        parameters = count_parameters(PRESETS["wikitext2-tiny"].changed({"form": "residual"}).build(vocabulary=4097))
    for evaluations in (2, 4, 8):
        yield f"reversible, {evaluations} evaluations", {"max_steps": evaluations // 2}
    yield f"reversible, 8 evaluations, {TUNED}", {"max_steps": 4, "tune_every": 100}
    yield "reversible, norms after the residual paths, 8 evaluations", {"max_steps": 4, "form": "residual"}
    yield "reversible, equation 7 as printed, 8 evaluations", {"max_steps": 4, "form": "paper"}
    yield "classical, 12 evaluations", {"solver": "torchdeq", "evaluations": 12}
    for depth in (1, 2):
        with torch.device("meta"):
            hidden = Transformer.sized(parameters, depth=depth, **shape).hidden
        yield (
            f"transformer, {depth} layer{'s' * (depth > 1)}",
            {"model": "transformer", "depth": depth, "hidden": hidden},
        )


def image_variants():
    settings = PRESETS["cifar10-tiny"].settings
    with torch.device("meta"):
        parameters = count_parameters(PRESETS["cifar10-tiny"].build())
        resnet = ResNet.sized(parameters, settings["channels"], depth=1)
    yield "reversible, 3 evaluations per scale", {}
    yield "reversible, 5 evaluations per scale", {"max_steps": (1, 4, 4, 1)}
    yield f"reversible, 5 evaluations per scale, {TUNED}", {"max_steps": (1, 4, 4, 1), "tune_every": 100}
    yield "classical, 15 evaluations per scale", {"solver": "torchdeq", "evaluations": 15}
    yield "ResNet, the same channels", {"model": "resnet", "depth": 2}
    channels = [resnet.encode.out_channels, *(block.conv2.out_channels for block in resnet.blocks[1:])]
    yield "ResNet, one block per scale", {"model": "resnet", "channels": tuple(channels), "depth": 1}


def state_variants():
    yield "float64 state", {}
    yield "exact state", {"state": "exact"}
    yield "stored graph", {"solver": "stored"}
    # What differences of the size of rounding grow to by themselves.
    yield "stored graph, weight decay 0.1 % larger", {"solver": "stored", "weight_decay": 1.001e-4}


def puzzle_variants(name):
    """The explicit networks have as many blocks as the equilibrium evaluates f in an update, on average."""
    preset = PRESETS[name]
    fewest, most = preset.range_of_steps
    middle, shapes = (fewest + most) // 2, {"features": 3, "dimensions": 2}
    if name == "prefix-tiny":
        shapes = {"features": 1, "dimensions": 1}
    with torch.device("meta"):
        parameters = count_parameters(preset.build(**shapes))
        channels = PuzzleNet.sized(parameters, depth=2 * middle, **shapes).classify[0].in_features
    yield f"reversible, N = {fewest} to {most}", {}
    yield f"reversible, N = {middle}", {"max_steps": middle}
    yield f"the implicit gradient, N = {middle}", {"max_steps": middle, "gradient": "implicit"}
    yield f"the last three steps' gradient, N = {middle}", {"max_steps": middle, "backward_steps": 3}
    yield f"the last step's gradient, N = {middle}", {"max_steps": middle, "backward_steps": 1}
    yield "classical (torchdeq, IFT)", {"solver": "torchdeq"}
    yield "classical (torchdeq, IFT), 40 evaluations", {"solver": "torchdeq", "evaluations": 40}
    explicit = {"model": "puzzle-net", "depth": 2 * middle}
    yield f"explicit, {2 * middle} blocks, the same parameters", {**explicit, "channels": channels}
    yield f"explicit, {2 * middle} blocks, the same compute", explicit


def prefix_variants():
    (label, _), *others = puzzle_variants("prefix-tiny")
    yield label, {}
    yield f"{label}, always from z = 0", {"noise": 0.0}
    yield from others


def maze_variants():
    (label, _), *others = puzzle_variants("maze-tiny")
    yield label, {}
    yield from others
    for name, changes in [(label, {}), *(other for other in others if "backward_steps" in other[1])]:
        yield f"{name}, random paths in training", {**changes, "longest_of": 1}


STUDIES = {
    # 300,000 tokens; a quarter of the validation set
    "language": Study(
        "wikitext2-tiny",
        300,
        {"batch": 16, "vocabulary": 4096, "evaluation_batches": 64, "evaluate_every": 250},
        language_variants,
        rates=(3e-3, 6e-3, 1.2e-2),
        clock="reversible, 8 evaluations",
    ),
    "image": Study(
        "cifar10-tiny", 312, {"evaluate_every": 156}, image_variants,
        rates=(3e-3, 6e-3, 1.2e-2), clock="reversible, 3 evaluations per scale",
    ),
    "states": Study("cifar10-tiny", 390, {"evaluate_every": 390, "log_every": 1}, state_variants, seeds=1),
    "prefix": Study(
        "prefix-tiny", PRESETS["prefix-tiny"].training.updates, {}, prefix_variants, rates=(4e-3, 2e-3, 8e-3),
        size="bits", sizes=(16, 32, 64, 128), depths=(5, 10, 20, 40, 80, 160),
    ),
    "maze": Study(
        "maze-tiny", PRESETS["maze-tiny"].training.updates, {}, maze_variants, rates=(3e-3, 1.5e-3, 6e-3),
        size="cells", sizes=(4, 6, 8, 12), depths=(4, 8, 16, 32, 64, 128),
    ),
}  # fmt: skip


@functools.cache
def variants(name):
    """Of a study: labels, each with the settings that make it. To find equal sizes takes a second."""
    return tuple(STUDIES[name].variants())


PROBED = 200
"""Puzzles of each size that a model is evaluated on."""


class Task(NamedTuple):
    study: str
    label: str
    changes: Changes
    lr: float
    seed: int
    updates: int

    @property
    def key(self) -> dict[str, str]:
        """What its row has in these columns."""
        return {
            "study": self.study,
            "label": self.label,
            "lr": str(self.lr),
            "seed": str(self.seed),
            "updates": str(self.updates),
        }

    @property
    def name(self) -> str:
        words = f"{self.study} {self.label} {self.lr} {self.updates} {self.seed}"
        return "".join(c if c.isalnum() else "-" for c in words)

    @property
    def settings(self) -> Changes:
        """Of the preset."""
        own = {"lr": self.lr, "seed": self.seed, "updates": self.updates, "epochs": 10**6}
        return {**STUDIES[self.study].settings, **self.changes, **own}

    def command(self, folder: Path | str | None, out: Path | str) -> list[str]:
        study = STUDIES[self.study]
        words = ["-m", "revdeq", "train", study.preset, "--out", str(out), "--resume"]
        if not study.sizes:
            words += ["--data", str(folder)]
        for key, value in self.settings.items():
            words += ["--set", f"{key}={value}".replace(" ", "")]
        return words

    @property
    def written(self) -> str:
        """The command with the reader's own folders in it."""
        return shlex.join(["python", *self.command("DIR", f"runs/{self.name}")])


def tasks(names, seeds, updates, rows, also=()):
    """What is to be trained, in the order of its importance: seeds outside, so that every variant has been trained as
    often as the others when time runs out. The learning rate of other seeds and of other budgets is known when all have
    been tried.

    updates: by study and label, where they are not those of the study.
    also: learning rates that get all seeds, whichever is the best.
    """
    for seed in range(seeds):
        for name in names:
            study = STUDIES[name]
            for label, changes in variants(name):
                known = Task(name, label, changes, 0, seed, study.updates)
                rates = study.rates or (PRESETS[study.preset].training.lr,)
                asked = updates.get((name, label), study.updates)
                if seed >= study.seeds:
                    continue
                best, rates = search(known, rates, rows)
                if seed == 0 and asked == study.updates:
                    yield from (known._replace(lr=lr) for lr in dict.fromkeys((*rates, *also)))
                elif best is not None:
                    yield from (known._replace(lr=lr, updates=asked) for lr in dict.fromkeys((best, *also)))


def equal_time(name, speeds):
    """Updates of each variant in the time that the study's updates take its clock."""
    study = STUDIES[name]
    seconds = {row["label"]: float(row["seconds"]) for row in speeds if row["study"] == name}
    if study.clock not in seconds:
        return {}
    return {(name, label): round(study.updates * seconds[study.clock] / each) for label, each in seconds.items()}


def goodness(row):
    """By which learning rates are chosen."""
    return float(row["choice"]) * (-1 if row["metric"] == "perplexity" else 1)


def search(task, rates, rows):
    """The learning rate that is the best at seed 0, None if it is not known yet; and those to be tried."""
    scores = {}
    for row in rows:
        lr = float(row["lr"])
        if task._replace(lr=lr, seed=0).key.items() <= row.items():
            scores[lr] = goodness(row)
    rates = (*rates, *(lr for lr in sorted(scores) if lr not in rates))  # all that were tried, for whatever reason
    while all(lr in scores for lr in rates):
        best = max(rates, key=scores.get)
        if len(rates) == 1 or min(rates) < best < max(rates):
            return best, rates
        rates = (*rates, best / 2 if best == min(rates) else best * 2)
    return None, rates


def run(words, threads, until):
    """True if the training ended; False if the time did."""
    child = subprocess.Popen([sys.executable, *words], env={**os.environ, "OMP_NUM_THREADS": str(threads)})
    try:
        code = child.wait(timeout=None if until is None else max(0.0, until - time.monotonic()))
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as reason:
        child.send_signal(signal.SIGTERM)  # it saves, and goes on from there the next time
        child.wait()
        if isinstance(reason, KeyboardInterrupt):
            raise
        return False
    if code:
        raise SystemExit(f"this failed: {shlex.join(['python', *words])}")
    return True


def measured(task, threads, folder, out):
    """A row, the curve and the probes of a training that has ended."""
    study = STUDIES[task.study]
    preset, data, model, _, last = restored(out / "last.pt", folder)
    test = evaluate(model, data, "test", dataclasses.replace(preset.training, evaluation_batches=None))
    final = last["rows"][-1]
    explicit = test.evaluations is None
    depths = (None,) if explicit else study.depths

    def solved(size, depth, split):
        changes = {study.size: size, "batch": 50, "evaluation_batches": PROBED // 50}
        if "evaluations" in task.changes:
            changes["evaluations"] = 2 * depth
        elif depth:
            changes["max_steps"] = depth
        trained = restored(out / "last.pt", folder, changes)
        return evaluate(trained.model, trained.dataset, split, trained.preset.training).metric

    row = {
        "run": f"{task.name} {int(time.time())}",
        "edition": EDITION,
        **task.key,
        "parameters": count_parameters(model),
        "metric": data.metric.name,
        "validation": final["metric"],
        "choice": solved(study.sizes[-2], depths[-1], data.validation) if study.sizes else final["metric"],
        "test": test.metric,
        "best_validation": last["best"],
        "loss": final["loss"],
        "evaluations": "" if explicit else test.evaluations,
        "residual": "" if test.residual is None else test.residual,
        "seconds": last["seconds"],
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {threads} threads",
        "command": task.written,
    }
    # Of most curves the evaluations are enough, and the first loss, which tells whether it was the same training.
    whole = "log_every" in study.settings
    curve = [
        {"run": row["run"], **{key: made[key] for key in CURVE[1:]}}
        for i, made in enumerate(last["rows"])
        if whole or i == 0 or made["metric"] != ""
    ]
    probes = [
        {"run": row["run"], "size": size, "max_steps": depth or "", "solved": solved(size, depth, "test")}
        for size, depth in itertools.product(study.sizes, depths)
    ]
    return row, curve, probes


def prepared(preset, folder=None):
    """A model to be trained, and a function that computes its loss on a batch."""
    data = load(preset.data, folder, preset.settings)
    model = preset.build(**data.shapes)
    batch = data.batch(torch.arange(preset.training.batch), torch.Generator().manual_seed(0))
    return model, lambda: loss_of(model(batch.inputs), batch.targets)


def memory(name):
    """What an update allocates, at most, at each number of steps: bytes by the reversible solver and by a stored
    graph."""
    study = STUDIES[name]
    for solver, depth in itertools.product(("reversible", "stored"), study.depths):
        model, loss = prepared(PRESETS[study.preset].changed({"max_steps": depth, "solver": solver}))

        def update(model=model, loss=loss):
            torch.autograd.grad(loss(), list(model.parameters()))

        update()  # what is allocated once only
        yield {"study": name, "solver": solver, "max_steps": depth, "bytes": peak_memory(update)}


def speeds(name, folder, rounds=12):
    """Seconds of an update of each variant by one processor, the fastest: programs that run beside it, and threads that
    wait for each other, would favour the one or the other."""
    study, updates, clock = STUDIES[name], {}, one_thread()
    for label, changes in variants(name):
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


def append(path, columns, rows):
    new = not path.exists()
    with open(path, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def table(path):
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines())) if path.exists() else []


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?", metavar="DIR", help="with wikitext-2, gpt2 and CIFAR-10")
    parser.add_argument("--study", choices=STUDIES, action="append", help="one or more (default: all)")
    parser.add_argument("--label", action="append", help="only variants whose label begins like this")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate", type=float, action="append", default=[], help="a learning rate to try as well")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--updates", type=int, help="of each training (default: what the study says)")
    budget.add_argument("--equal-time", action="store_true", help="as many updates as the same time allows")
    parser.add_argument("--minutes", type=float, help="stop after so long; the next call goes on from there")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time, which share the cores")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "evidence", help="default: %(default)s")
    parser.add_argument("--runs", type=Path, default=Path("runs") / "evidence", help="default: %(default)s")
    parser.add_argument("--report", action="store_true", help="only the tables and plots of the rows there are")
    parser.add_argument("--check", action="store_true", help="only repeat the first updates of each variant")
    arguments = parser.parse_args()
    import evidence_check
    import evidence_report

    names = arguments.study or list(STUDIES)
    if arguments.report:
        evidence_report.report(arguments.results, arguments.runs)
        return
    if arguments.data is None and any(not STUDIES[name].sizes for name in names):
        parser.error("DIR is missing: all studies but prefix and maze read data")
    if arguments.check:
        sys.exit(evidence_check.check(arguments.results, arguments.data, names))
    arguments.results.mkdir(parents=True, exist_ok=True)
    until = None if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
    threads = max(1, torch.get_num_threads() // arguments.jobs)
    writing = threading.Lock()

    def train_and_measure(task):
        if until is not None and time.monotonic() > until:
            return
        out = arguments.runs / task.name
        print(f"{task.study}: {task.label}, lr {task.lr}, seed {task.seed}, {task.updates} updates", flush=True)
        if not run(task.command(arguments.data, out), threads, until):
            print("out of time: call again to go on")
            return
        row, curve, probes = measured(task, threads, arguments.data, out)
        with writing:
            append(arguments.results / "curves.csv", CURVE, curve)
            append(arguments.results / "probes.csv", PROBE, probes)
            append(arguments.results / "runs.csv", ROW, [row])  # last: a row means that all of the run is there

    updates = {}
    for name in names:
        if arguments.updates is not None:
            updates |= {(name, label): arguments.updates for label, _ in variants(name)}
        elif arguments.equal_time and STUDIES[name].clock:
            path = arguments.results / "speeds.csv"
            if not equal_time(name, table(path)):
                append(path, SPEED, speeds(name, arguments.data))
            updates |= equal_time(name, table(path))
    while True:
        rows = table(arguments.results / "runs.csv")
        todo = [
            task
            for task in tasks(names, arguments.seeds, updates, rows, arguments.rate)
            if not any(task.key.items() <= row.items() for row in rows)
            and (not arguments.label or task.label.startswith(tuple(arguments.label)))
        ]
        if not todo or (until is not None and time.monotonic() > until):
            break
        with ThreadPoolExecutor(arguments.jobs) as pool:
            trainings = [pool.submit(train_and_measure, task) for task in todo]
            try:
                for training in trainings:
                    training.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    known = {row["study"] for row in table(arguments.results / "memory.csv")}
    for name in names:
        if STUDIES[name].sizes and name not in known:
            append(arguments.results / "memory.csv", MEMORY, list(memory(name)))
    evidence_report.report(arguments.results, arguments.runs)


if __name__ == "__main__":
    main()
