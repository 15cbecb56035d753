"""The paper's comparisons at a size for two cores: many small trainings, one row each, tables and plots of the rows.

    python bench/evidence.py DIR --jobs 2              # all studies, until they are done, two trainings at a time
    python bench/evidence.py DIR --study language --updates 1000 --minutes 60
    python bench/evidence.py DIR --report              # tables and plots of the rows there are

language  perplexity on WikiText-2 against evaluations of f, beside the classical equilibrium model (torchdeq, with the
          implicit function theorem) and transformers with as many parameters
image     accuracy on CIFAR-10 of the reversible and the classical model and of a ResNet with as many parameters
states    the same training with the float64 state, the exact state and the stored graph: loss curves

Every training is a command of its own, which the table of rows holds. What was interrupted, or ran out of --minutes,
goes on where it was when this is called again.
"""

import argparse
import csv
import dataclasses
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from revdeq.models import ResNet, Transformer, count_parameters
from revdeq.training import run as train
from revdeq.training.presets import PRESETS

HERE = Path(__file__).parent
PRESET = {"language": "wikitext2-tiny", "image": "cifar10-tiny", "states": "cifar10-tiny"}
UPDATES = {"language": 300, "image": 312, "states": 390}
FOR_ALL = {
    # 300,000 tokens; a quarter of the validation and of the test set
    "language": {"batch": 16, "vocabulary": 4096, "evaluation_batches": 64, "evaluate_every": 250},
    "image": {"evaluate_every": 156},
    "states": {"evaluate_every": 390, "log_every": 1},
}
EVALUATIONS = (2, 4, 6, 8, 12)
ROW = (
    "study", "label", "seed", "updates", "parameters", "metric", "validation", "test", "best_validation", "loss",
    "evaluations", "residual", "seconds", "torch", "machine", "command",
)  # fmt: skip
MADE = "<!-- From here on made of runs.csv by python bench/evidence.py DIR --report -->"
CURVE = ("study", "label", "seed", "update", "loss", "evaluation_loss", "metric")


def language_variants():
    settings = PRESETS["wikitext2-tiny"].settings
    vocabulary = FOR_ALL["language"]["vocabulary"] + 1
    shape = {"vocabulary": vocabulary, **{key: settings[key] for key in ("d", "heads", "length", "dropout")}}
    with torch.device("meta"):
        parameters = count_parameters(PRESETS["wikitext2-tiny"].build(vocabulary=vocabulary))
    for evaluations in EVALUATIONS:
        yield f"reversible, {evaluations} evaluations", {"max_steps": evaluations // 2}
    for evaluations in (12, 30):
        yield f"classical, {evaluations} evaluations", {"solver": "torchdeq", "evaluations": evaluations}
    with torch.device("meta"):
        hidden = Transformer.sized(parameters, depth=2, **shape).hidden
    yield "transformer, 2 layers", {"model": "transformer", "depth": 2, "hidden": hidden}


def image_variants():
    settings = PRESETS["cifar10-tiny"].settings
    with torch.device("meta"):
        parameters = count_parameters(PRESETS["cifar10-tiny"].build())
        resnet = ResNet.sized(parameters, settings["channels"], depth=1)
    yield "reversible, 3 evaluations per scale", {}
    yield "reversible, 5 evaluations per scale", {"max_steps": (1, 4, 4, 1)}
    yield "classical, 15 evaluations per scale", {"solver": "torchdeq", "evaluations": 15}
    channels = [resnet.encode.out_channels, *(block.conv2.out_channels for block in resnet.blocks[1:])]
    yield "ResNet, one block per scale", {"model": "resnet", "channels": tuple(channels), "depth": 1}


def state_variants():
    yield "float64 state", {}
    yield "exact state", {"state": "exact"}
    yield "stored graph", {"solver": "stored"}


VARIANTS = {"language": language_variants, "image": image_variants, "states": state_variants}


def command(study, changes, seed, updates, folder, out):
    settings = {**FOR_ALL[study], **changes, "seed": seed, "updates": updates, "epochs": 10**6}
    words = ["-m", "revdeq", "train", PRESET[study], "--data", str(folder), "--out", str(out), "--resume"]
    for key, value in settings.items():
        words += ["--set", f"{key}={value}".replace(" ", "")]
    return words


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


def measured(study, label, seed, updates, words, threads, folder, out):
    preset, data, model, _, last = train.restored(out / "last.pt", folder)
    test = train.evaluate(model, data, "test", dataclasses.replace(preset.training, evaluation_batches=None))
    final = last["rows"][-1]
    row = {
        "study": study,
        "label": label,
        "seed": seed,
        "updates": updates,
        "parameters": count_parameters(model),
        "metric": data.metric.name,
        "validation": final["metric"],
        "test": test.metric,
        "best_validation": last["best"],
        "loss": final["loss"],
        "evaluations": "" if test.evaluations is None else test.evaluations,
        "residual": "" if test.residual is None else test.residual,
        "seconds": last["seconds"],
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {threads} threads",
        # the folders are the reader's own
        "command": shlex.join(["python", *words]).replace(str(folder), "DIR").replace(str(out), f"runs/{out.name}"),
    }
    curve = [{"study": study, "label": label, "seed": seed, **row} for row in last["rows"]]
    return row, [{key: row[key] for key in CURVE} for row in curve]


def append(path, columns, rows):
    new = not path.exists()
    with open(path, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def table(path):
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines())) if path.exists() else []


def spread(values):
    return f"{statistics.mean(values):.4g}" + (f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else "")


def report(results):
    from matplotlib.figure import Figure

    rows, curves = table(results / "runs.csv"), table(results / "curves.csv")
    lines = [MADE, "", "± is the deviation between seeds.", ""]
    for study in VARIANTS:
        order = [label for label, _ in VARIANTS[study]()]
        ours = [row for row in rows if row["study"] == study and row["label"] in order]
        ours.sort(key=lambda row: (order.index(row["label"]), int(row["updates"]), row["seed"]))
        if not ours:
            continue
        metric = ours[0]["metric"]
        lines += [f"## {study}", ""]
        lines += [f"| | updates | seeds | parameters | evaluations | {metric}, validation | {metric}, test |"]
        lines += ["|---|---|---|---|---|---|---|"]
        for label, updates in dict.fromkeys((row["label"], row["updates"]) for row in ours):
            same = [row for row in ours if (row["label"], row["updates"]) == (label, updates)]
            numbers = {key: [float(row[key]) for row in same] for key in ("validation", "test")}
            evaluations = {f"{float(row['evaluations']):.3g}" if row["evaluations"] else "" for row in same}
            lines += [
                f"| {label} | {updates} | {len(same)} | {int(same[0]['parameters']):,} | {', '.join(evaluations)} | "
                f"{spread(numbers['validation'])} | {spread(numbers['test'])} |"
            ]
        lines += ["", "```", *dict.fromkeys(row["command"] for row in ours if row["seed"] == "0"), "```", ""]

        figure = Figure(figsize=(10, 4), layout="constrained")
        loss, final = figure.subplots(1, 2)
        for label in dict.fromkeys(row["label"] for row in ours):
            curve = [row for row in curves if (row["study"], row["label"], row["seed"]) == (study, label, "0")]
            curve.sort(key=lambda row: int(row["update"]))  # evaluations are recorded after the rest
            loss.plot([int(row["update"]) for row in curve], [float(row["loss"]) for row in curve], label=label, lw=1)
        loss.set(xlabel="updates", ylabel="training loss, seed 0")
        loss.legend(fontsize=7)
        if study == "states":
            lines += differences(final, curves)
        else:
            labels = list(dict.fromkeys(row["label"] for row in ours))
            for row in ours:
                final.plot(float(row["validation"]), labels.index(row["label"]), "o", color="C0", alpha=0.6)
            final.set(yticks=range(len(labels)), xlabel=f"{metric}, validation, each seed")
            final.set_yticklabels(labels, fontsize=7)
            final.invert_yaxis()
        for axes in (loss, final):
            axes.grid(alpha=0.3)
        figure.savefig(results / f"{study}.png", dpi=120)
    page = results / "README.md"
    written = page.read_text(encoding="utf-8").partition(MADE)[0] if page.exists() else ""
    page.write_text(written + "\n".join(lines).rstrip() + "\n", encoding="utf-8")
    print("\n".join(lines))


def differences(axes, curves):
    """How far the loss is from that of the stored graph, update by update. The loss is a float32: 0 is "less than a
    unit in its last place", about 1e-7, and not "the same computation"."""
    by_label = {}
    for row in curves:
        if row["study"] == "states" and row["seed"] == "0":
            by_label.setdefault(row["label"], {})[int(row["update"])] = float(row["loss"])
    stored, lines = by_label.pop("stored graph", {}), []
    for label, losses in by_label.items():
        updates = [update for update in losses if update in stored]
        apart = [abs(losses[update] - stored[update]) / stored[update] for update in updates]
        if apart:
            axes.plot(updates, [max(d, 1e-9) for d in apart], label=label, lw=1)
            shown = ", ".join(f"{apart[i]:.1e} at update {updates[i]}" for i in (0, len(apart) // 2, len(apart) - 1))
            lines += [f"{label}, relative distance of the loss from that of the stored graph: {shown}.", ""]
    axes.set(yscale="log", xlabel="updates", ylabel="distance of the loss from the stored graph's")
    axes.legend(fontsize=7)
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, metavar="DIR", help="with wikitext-2, gpt2 and CIFAR-10")
    parser.add_argument("--study", choices=VARIANTS, action="append", help="one or more (default: all)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, help=f"of each training (default: {UPDATES})")
    parser.add_argument("--minutes", type=float, help="stop after so long; the next call goes on from there")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time, which share the cores")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "evidence", help="default: %(default)s")
    parser.add_argument("--runs", type=Path, default=Path("runs") / "evidence", help="default: %(default)s")
    parser.add_argument("--report", action="store_true", help="only the tables and plots of the rows there are")
    arguments = parser.parse_args()
    arguments.results.mkdir(parents=True, exist_ok=True)
    until = None if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
    # Seeds outside: when time runs out, every variant has been trained as often as the others, or once more.
    todo = [
        (study, label, changes, seed)
        for seed in range(0 if arguments.report else arguments.seeds)
        for study in arguments.study or VARIANTS
        for label, changes in VARIANTS[study]()
        if seed == 0 or study != "states"
    ]
    threads = max(1, torch.get_num_threads() // arguments.jobs)
    done = table(arguments.results / "runs.csv")

    def train_and_measure(study, label, changes, seed):
        updates = arguments.updates or UPDATES[study]
        key = {"study": study, "label": label, "seed": str(seed), "updates": str(updates)}
        if any(key.items() <= row.items() for row in done):
            return
        if until is not None and time.monotonic() > until:
            return
        name = "".join(c if c.isalnum() else "-" for c in f"{study} {label}")
        out = arguments.runs / f"{name}-{updates}-{seed}"
        words = command(study, changes, seed, updates, arguments.data, out)
        print(f"{study}: {label}, seed {seed}, {updates} updates", flush=True)
        if not run(words, threads, until):
            print("out of time: call again to go on")
            return
        row, curve = measured(study, label, seed, updates, words, threads, arguments.data, out)
        with writing:
            append(arguments.results / "curves.csv", CURVE, curve)
            append(arguments.results / "runs.csv", ROW, [row])  # last: a row means that all of the run is there

    writing = threading.Lock()
    with ThreadPoolExecutor(arguments.jobs) as pool:
        trainings = [pool.submit(train_and_measure, *one) for one in todo]
        try:
            for training in trainings:
                training.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    report(arguments.results)


if __name__ == "__main__":
    main()
