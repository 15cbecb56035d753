"""Writes the page about the trainings of evidence.py: page.md with tables and numbers from the CSV files, and pictures.

In page.md, {maze} is the table of the study maze, {maze_steps} that of its first variant by the number of steps,
{program} that of TRM (bench/looped.py), and everything else in braces is a number from `facts`.
"""

import collections
import math
import shlex
import statistics

import table
from evidence import EDITION, STUDIES, Task, chosen, equal_time, read
from matplotlib.figure import Figure

BLUE, ORANGE, GREY = "#1f6fb4", "#d9730d", "#8a8f98"


class Tables:
    """The CSV files of a folder. Exits if rows are stale."""

    def __init__(self, results):
        self.runs, self.memory, self.speeds = (read(results, name) for name in ("runs", "memory", "speeds"))
        self.solved = {
            (probe["run"], int(probe["size"]), probe["max_steps"]): float(probe["solved"])
            for probe in read(results, "probes")
        }
        if found := list(stale(self.runs)):
            raise SystemExit("\n".join(["the rows cannot be reported as they are:", *found]))

    def shares(self, rows, size, depth):
        """The percentage of puzzles that each run solves. A network without steps has the same at every depth."""
        found = [
            self.solved.get((row["run"], size, str(depth)), self.solved.get((row["run"], size, ""))) for row in rows
        ]
        return [round(100 * share, 3) for share in found]

    def by_budget(self, name):
        """By label: its rows with the study's updates, with the clock's time, and with the most updates."""
        best, timed = chosen(name, self.runs), equal_time(name, self.speeds)
        longest = max(updates for _, updates in best)
        return {
            label: [
                best.get((label, updates), []) for updates in (STUDIES[name].updates, timed.get((name, label)), longest)
            ]
            for label in dict.fromkeys(label for label, _ in best)
        }

    def mebibytes(self, name, solver):
        rows = [row for row in self.memory if (row["study"], row["solver"]) == (name, solver)]
        return {int(row["max_steps"]): int(row["bytes"]) / 2**20 for row in rows}


def stale(rows):
    """What is wrong with rows, as sentences: duplicates, and those whose training has another command by now."""
    count = collections.Counter(map(Task.of, rows))
    for row in rows:
        task = Task.of(row)
        if count[task] > 1:
            yield f"{row['run']}: there are {count[task]} rows of this training; keep one"
        elif row["edition"] != str(EDITION) or row["label"] not in STUDIES[row["study"]].variants:
            yield f"{row['run']} is stale: of edition {row['edition']}, or its variant is gone"
        elif row["command"] != shlex.join(["python", *task.command()]):
            yield f"{row['run']} is stale: its command is now {shlex.join(task.command())}"


# Tables


def markdown(header, rows):
    return "\n".join("|".join(("", *map(str, line), "")) for line in (header, ["---"] * len(header), *rows))


def span(shares):
    """The range from the worst to the best, rounded outwards."""
    low, high = math.floor(min(shares)), math.ceil(max(shares))
    return f"{low} to {high} %" if low < high else f"{low} %"


def percent(shares):
    mean, seeds = f"{statistics.mean(shares):.0f} %", span(shares)
    return mean if len(set(shares)) == 1 else f"{mean} ({seeds.removesuffix(' %').replace(' to ', '–')})"


def scores(rows):
    return [float(row["validation"]) * (1 if row["metric"] == "perplexity" else 100) for row in rows]


def score(rows):
    """The mean over seeds, with their standard deviation."""
    values = scores(rows)
    return f"{statistics.mean(values):.1f}" + (f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else "")


def sized(study, size):
    return f"{size} x {size} cells" if study.size == "cells" else f"{size} {study.size}"


def puzzle_table(tables, name):
    """Solved puzzles of each size with the most steps."""
    study = STUDIES[name]
    rows = [
        [label, *(percent(tables.shares(group, size, study.depths[-1])) for size in study.sizes)]
        for (label, _), group in chosen(name, tables.runs).items()
    ]
    return markdown([f"solved with N = {study.depths[-1]}", *(sized(study, size) for size in study.sizes)], rows)


def steps_table(tables, name):
    """Solved puzzles of each size by the number of steps, and the peak memory of an update with as many."""
    study, group = STUDIES[name], next(iter(chosen(name, tables.runs).values()))
    rows = [
        [sized(study, size), *(percent(tables.shares(group, size, n)) for n in study.depths)] for size in study.sizes
    ]
    for solver, words in (("reversible", "memory, reversible"), ("stored", "memory, stored graph")):
        taken = tables.mebibytes(name, solver)
        rows.append([words, *(f"{taken[n]:.1f} MiB" for n in study.depths)])
    return markdown(["", *(f"N = {n}" for n in study.depths)], rows)


def score_table(tables, titles):
    """A group of rows for each study: its variants with the same updates, in the same time, and with many updates."""
    rows, longest = [], 0
    for name, title in titles.items():
        groups = tables.by_budget(name)
        rows.append([f"**{title}**", "", f"*{STUDIES[name].updates} updates*", "", ""])
        for label, (same, timed, long) in groups.items():
            at_the_time = f"{score(timed)} ({int(timed[0]['updates']):,})" if timed else ""
            parameters = f"{int(same[0]['parameters']):,}"
            rows.append([label, parameters, score(same), at_the_time, score(long) if long else ""])
            longest = max([longest, *(int(row["updates"]) for row in long)])
    return markdown(["", "parameters", "equal updates", "equal time (updates)", f"{longest:,} updates"], rows)


LOOPS = {
    "their own loop": "their own loop, gradient of the last cycle",
    "stored graph of their loop": "the same, gradient of all cycles, stored graph",
    "reversible, gamma .25": "damped loop, gradient of all cycles, reversible",
    "reversible, gamma .25, last step": "damped loop, gradient of the last step",
}


def program_table(results):
    """Sudokus that TRM solves with each loop by the number of updates, and the time and memory of training."""
    measured = [row for path in sorted(results.parent.glob("*/looped.csv")) for row in table.read(path)]
    found = collections.defaultdict(list)
    for row in measured:
        program, _, part = row.benchmark.removeprefix("looped, ").partition(", ")
        if program == "TRM":
            found[part.split()[0] if part else "", row.provider, row.size, row.quantity].append(row.p50)
    updates = sorted({size for part, _, size, _ in found if part == "seed"})
    cycles = min(size for part, _, size, _ in found if part == "costs")
    rows = []
    for loop, label in LOOPS.items():
        solved = [percent([round(100 * share, 1) for share in found["seed", loop, n, "solved"]]) for n in updates]
        seconds = statistics.mean(found["seed", loop, updates[-1], "seconds"])
        (size,) = found["costs", loop, cycles, "bytes"]
        rows.append([label, *solved, f"{seconds:.0f} s", f"{size / 2**20:.0f} MiB"])
    header = (f"{n} updates" for n in updates)
    return markdown(["solved after", *header, "time of all", "memory"], rows)


# Numbers in the text

EXACT = [label for label in STUDIES["maze"].variants if label.startswith("exact") and "random" not in label]
RANDOM = [label for label in STUDIES["maze"].variants if "random" in label]


def facts(tables):
    """For mazes: the largest with the most steps. For text and images: the best of a family, with the same time."""
    study = STUDIES["maze"]
    size, depth = study.sizes[-1], study.depths[-1]
    of = {label: tables.shares(rows, size, depth) for (label, _), rows in chosen("maze", tables.runs).items()}
    others = [row for row in tables.runs if row["study"] == "maze" and row["label"] not in (*EXACT, *RANDOM)]
    drawn = [row for row in tables.runs if (row["study"], row["label"]) == ("maze", EXACT[0])]
    by_rate = {float(row["lr"]): [other for other in drawn if other["lr"] == row["lr"]] for row in drawn}
    ours, stored = (tables.mebibytes("maze", solver) for solver in ("reversible", "stored"))

    def best(name, family, choose):
        groups = [
            timed for label, (_, timed, _) in tables.by_budget(name).items() if label.startswith(family) and timed
        ]
        return f"{choose(statistics.mean(scores(rows)) for rows in groups):.0f}"

    return {
        "exact": span([share for label in EXACT for share in of[label]]),
        "exact_rates": ", ".join(
            f"{percent(tables.shares(by_rate[lr], size, depth))} at {lr:g}" for lr in sorted(by_rate)
        ),
        "others": f"{math.ceil(max(tables.shares(others, size, depth)))} %",
        "others_smaller": f"{math.ceil(max(tables.shares(others, study.sizes[-2], depth)))} %",
        "others_trained": len(others),
        "random": [span(of[label]) for label in RANDOM],
        "memory": f"{ours[study.depths[0]]:.1f} to {ours[depth]:.1f} MiB",
        "memory_stored": f"{stored[depth]:.0f} MiB",
        "text_reversible": best("language", "reversible", min),
        "text_explicit": best("language", "transformer", min),
        "images_reversible": best("image", "reversible", max),
        "images_explicit": best("image", "ResNet", max),
        "rows": len(tables.runs),
    }


# Pictures


def in_two_lines(label):
    head, _, tail = label.rpartition(", ")
    return f"{head},\n{tail}" if len(label) > 27 else label


def transfer_figure(tables):
    """Solved mazes of the training's size, and of the largest: a bar for each variant, a point for each seed."""
    study = STUDIES["maze"]
    groups = {label: rows for (label, _), rows in chosen("maze", tables.runs).items() if label not in RANDOM}
    figure = Figure(figsize=(12, 1.3 + 0.42 * len(groups)), layout="constrained")
    figure.suptitle("Only the exact gradient transfers to mazes larger than those trained on", fontsize=13)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, size, seen in zip(
        panels, (study.sizes[0], study.sizes[-1]), ("as in training", "three times as wide"), strict=True
    ):
        for i, (label, rows) in enumerate(groups.items()):
            shares = tables.shares(rows, size, study.depths[-1])
            axes.barh(i, statistics.mean(shares), 0.62, color=BLUE if label in EXACT else GREY)
            axes.plot(shares, [i] * len(shares), ".", color="black", ms=4)
            words = f"{statistics.mean(shares):.0f} %"
            axes.annotate(words, (max(shares), i), (6, 0), textcoords="offset points", va="center", fontsize=9)
        axes.set(xlim=(0, 119), xticks=range(0, 101, 25), xlabel="mazes solved with N = 128 steps, % (points: seeds)")
        axes.set_title(f"{sized(study, size)}, {seen}", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
    axes.set_yticks(range(len(groups)), list(map(in_two_lines, groups)), fontsize=9)
    axes.invert_yaxis()
    return figure


def budgets_figure(tables):
    """From equal updates (rings) to equal time (discs), of each variant that was trained with both."""
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    figure.suptitle("With equal updates results are close; with equal time explicit networks win", fontsize=13)
    names = {
        "language": "WikiText-2: perplexity, lower is better",
        "image": "CIFAR-10: accuracy in %, higher is better",
    }
    for axes, (name, title) in zip(figure.subplots(1, 2), names.items(), strict=True):
        groups = {label: rows for label, rows in tables.by_budget(name).items() if rows[1]}
        for i, (same, timed, _) in enumerate(groups.values()):
            colour = BLUE if same[0]["evaluations"] else ORANGE
            a, b = (statistics.mean(scores(rows)) for rows in (same, timed))
            axes.plot([a, b], [i, i], color=colour, lw=1.5, alpha=0.5)
            axes.plot(a, i, "o", color=colour, mfc="white", ms=11, mew=1.5)
            axes.plot(b, i, "o", color=colour, ms=7)
        axes.set(xlabel=title, ylim=(len(groups) - 0.5, -0.5))
        axes.set_yticks(range(len(groups)), list(map(in_two_lines, groups)), fontsize=9)
        axes.grid(axis="x", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    marks = ("black", "white", 11, "equal updates"), ("black", "black", 7, "equal time")
    marks += (BLUE, BLUE, 7, "equilibrium"), (ORANGE, ORANGE, 7, "explicit network")
    handles = [axes.plot([], [], "o", color=c, mfc=f, ms=size, mew=1.5, label=words)[0] for c, f, size, words in marks]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=10)
    return figure


def page(results):
    """The text of the page, and its pictures by name."""
    tables = Tables(results)
    made = facts(tables) | {"program": program_table(results)}
    made["scores"] = score_table(
        tables, {"language": "text: validation perplexity", "image": "images: validation accuracy in %"}
    )
    made["maze"], made["maze_steps"] = puzzle_table(tables, "maze"), steps_table(tables, "maze")
    text = (results / "page.md").read_text(encoding="utf-8").format_map(made)
    return text, {"transfer": transfer_figure(tables), "budgets": budgets_figure(tables)}


def report(results):
    text, figures = page(results)
    (results / "README.md").write_text(text, encoding="utf-8")
    for name, figure in figures.items():
        figure.savefig(results / f"{name}.png", dpi=110)
