"""Tables and plots of the rows that evidence.py wrote; rows of stale or spliced runs are refused."""

import collections
import json
import statistics
import textwrap

from evidence import EDITION, STUDIES, Task, equal_time, goodness, table, variants

COLOURS = [f"C{i}" for i in range(10)] + ["black", "gold", "navy", "lime", "magenta", "teal"]
MARKERS = "os^vDP*X"
MADE = "<!-- From here on made of runs.csv by python bench/evidence.py --report -->"


def problems(rows, curves, probes):
    """What is wrong with the tables, in sentences: nothing, if every row, curve and probe is of one run of today."""
    found = []
    for columns, count in collections.Counter(
        tuple(row[k] for k in ("study", "label", "lr", "seed", "updates")) for row in rows
    ).items():
        if count > 1:
            found.append(f"{', '.join(columns)} has {count} rows: keep one run of it")
    known = {name: dict(variants(name)) for name in STUDIES}
    for row in rows:
        name = row["run"]
        if row["edition"] != str(EDITION):
            found.append(f"{name} is stale: of edition {row['edition']}, this is {EDITION}")
            continue
        changes = known.get(row["study"], {}).get(row["label"])
        if changes is None:
            found.append(f"{name} is stale: there is no such variant any more")
            continue
        task = Task(row["study"], row["label"], changes, float(row["lr"]), int(row["seed"]), int(row["updates"]))
        if row["command"] != task.written:
            found.append(f"{name} is stale: the command is now {task.written}")
        curve = [made for made in curves if made["run"] == name]
        updates = [int(made["update"]) for made in curve]
        if updates != sorted(set(updates)):
            found.append(f"{name} is spliced: its curve goes back in time")
        if not curve or updates[-1] != int(row["updates"]) or curve[-1]["metric"] != row["validation"]:
            found.append(f"{name} is spliced: its curve does not end where its row does")
    names = {row["run"] for row in rows}
    for name in {made["run"] for made in [*curves, *probes]} - names:
        found.append(f"{name} has no row: its curve or its probes are left over")
    return found


def spread(values):
    return f"{statistics.mean(values):.4g}" + (f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else "")


def chosen(rows):
    """Of the rows of a study, by label and updates: those with the learning rate that was best at seed 0."""
    groups = collections.defaultdict(list)
    for row in rows:
        groups[row["label"], row["updates"]].append(row)
    for key, group in groups.items():
        order = [str(lr) for lr in STUDIES[group[0]["study"]].rates]
        first = [row for row in group if row["seed"] == "0"]
        if not first:
            continue
        first.sort(key=lambda row, order=order: order.index(row["lr"]) if row["lr"] in order else len(order))
        best = max(first, key=goodness)["lr"]  # the first of equals
        yield key, [row for row in group if row["lr"] == best], len({row["lr"] for row in first})


def begun(runs):
    """Trainings that have not ended, and how far they have come."""
    for config in sorted(runs.glob("*/config.json")):
        rows, saved = table(config.parent / "metrics.csv"), json.loads(config.read_text(encoding="utf-8"))
        total = saved["training"]["updates"]
        if rows and int(rows[-1]["update"]) < total:
            metrics = [row["metric"] for row in rows if row["metric"]]
            last = f", {float(metrics[-1]):.4g} on the validation set" if metrics else ""
            yield f"- {config.parent.name}: update {int(rows[-1]['update']):,} of {total:,}{last}"


def report(results, runs=None):
    names = ("runs", "curves", "probes", "memory", "speeds")
    rows, curves, probes, memory, speeds = (table(results / f"{name}.csv") for name in names)
    if found := problems(rows, curves, probes):
        raise SystemExit("\n".join(["the tables cannot be reported as they are:", *sorted(found)]))
    lines = [
        MADE,
        "",
        "± is the deviation between seeds. Commands are those of seed 0 and the learning rate that was best;",
    ]
    lines += ["`--set seed=1` and another `--set lr` make the others, and runs.csv has them all.", ""]
    for name, study in STUDIES.items():
        order = [label for label, _ in variants(name)]
        ours = sorted((row for row in rows if row["study"] == name), key=lambda row: order.index(row["label"]))
        if not ours:
            continue
        lines += [f"## {name}", ""]
        lines += puzzle_lines(name, ours, probes, memory) if study.sizes else score_lines(name, ours, speeds)
        lines += [f"![{name}]({name}.png)", "", "```"]
        lines += [row["command"] for _, group, _ in chosen(ours) for row in group if row["seed"] == "0"]
        lines += ["```", ""]
        figure, said = drawn(name, ours, curves, probes, speeds)
        figure.savefig(results / f"{name}.png", dpi=120)
        lines += said
    if runs is not None and (lines_begun := list(begun(runs))):
        lines += ["## Still in training", "", *lines_begun, ""]
    page = results / "README.md"
    written = page.read_text(encoding="utf-8").partition(MADE)[0] if page.exists() else ""
    page.write_text(written + "\n".join(lines).rstrip() + "\n", encoding="utf-8")
    print("\n".join(lines))


def by_budget(name, ours, speeds):
    """The rows of a study in three tables: with the same updates for all, with the same time, and the others."""
    study = STUDIES[name]
    updates = {label: updates for (_, label), updates in equal_time(name, speeds).items()}
    same_updates = [row for row in ours if int(row["updates"]) == study.updates]
    same_time = [row for row in ours if int(row["updates"]) == updates.get(row["label"])]
    if not any(row not in same_updates for row in same_time):
        same_time = []
    return same_updates, same_time, [row for row in ours if row not in [*same_updates, *same_time]]


def score_lines(name, ours, speeds):
    study = STUDIES[name]
    same_updates, same_time, longer = by_budget(name, ours, speeds)
    for title, rows, wanted in (
        (f"{study.updates} updates each", same_updates, len(study.rates)),
        (f'The time of {study.updates} updates of "{study.clock}" each', same_time, 1),
        ("Longer trainings", longer, 1),
    ):
        if rows:
            yield f"**{title}**"
            yield ""
            yield from score_table(rows, wanted)


def rate(group, tried, wanted):
    """The learning rate of a group, and of how many it was the best."""
    words = f"{float(group[0]['lr']):g}" + (f" of {tried} tried" if tried > 1 else "")
    return words + (f" ({wanted - tried} to come)" if tried < wanted else "")


def score_table(ours, wanted):
    metric = ours[0]["metric"]
    yield f"| | updates | seeds | lr | parameters | evaluations | {metric}, validation | {metric}, test |"
    yield "|---|---|---|---|---|---|---|---|"
    for (label, updates), group, tried in chosen(ours):
        numbers = {key: [float(row[key]) for row in group] for key in ("validation", "test")}
        evaluations = {f"{float(row['evaluations']):.3g}" if row["evaluations"] else "" for row in group}
        yield (
            f"| {label} | {updates} | {len(group)} | {rate(group, tried, wanted)} | {int(group[0]['parameters']):,} | "
            f"{', '.join(evaluations)} | {spread(numbers['validation'])} | {spread(numbers['test'])} |"
        )
    yield ""


def solved(group, probes, size, depth):
    """Of each seed; a network without steps has the same at every depth."""
    names = [row["run"] for row in group]
    return [
        float(probe["solved"])
        for probe in probes
        if probe["run"] in names and probe["size"] == str(size) and probe["max_steps"] in ("", str(depth))
    ]


def sized(study, size):
    return f"{size} x {size} cells" if study.size == "cells" else f"{size} {study.size}"


def puzzle_lines(name, rows, probes, memory):
    study = STUDIES[name]
    yield "Solved puzzles of each size by the number of steps: the mean over seeds, and where they differ, the range."
    yield f"The learning rate is the best for {sized(study, study.sizes[-2])} of the validation set."
    yield ""
    yield f"| | seeds | lr | parameters | size | {' | '.join(f'N = {depth}' for depth in study.depths)} |"
    yield "|---" * (5 + len(study.depths)) + "|"
    for (label, _), group, tried in chosen(rows):
        for size in study.sizes:
            cells = []
            for depth in study.depths:
                values = solved(group, probes, size, depth)
                low, high = min(values), max(values)
                cells.append(f"{statistics.mean(values):.2f}" + (f" ({low:.2f} to {high:.2f})" if low < high else ""))
            begin = (
                f"| {label} | {len(group)} | {rate(group, tried, len(study.rates))} | {int(group[0]['parameters']):,}"
            )
            begin += f" | {sized(study, size)}"
            yield f"{begin} | {' | '.join(cells)} |"
    for solver in ("reversible", "stored"):
        ours = {
            row["max_steps"]: int(row["bytes"]) for row in memory if (row["study"], row["solver"]) == (name, solver)
        }
        if ours:
            what = "the reversible solver" if solver == "reversible" else "a stored graph"
            cells = [f"{ours[str(depth)] / 2**20:.1f} MiB" for depth in study.depths]
            yield f"| memory of an update by {what} | | | | {sized(study, study.sizes[0])} | {' | '.join(cells)} |"
    yield ""
    yield from rate_lines(study, rows, probes)


def rate_lines(study, rows, probes):
    """The larger puzzles at every learning rate: a variant is not behind because it was given the wrong one."""
    rows = [row for row in rows if int(row["updates"]) == study.updates]
    sizes, depth = study.sizes[-2:], study.depths[-1]
    rates = sorted({*study.rates, *(float(row["lr"]) for row in rows)})
    yield (
        f"By learning rate: solved puzzles of {' and of '.join(sized(study, size) for size in sizes)} "
        f"with N = {depth}, seed 0."
    )
    yield ""
    yield f"| | {' | '.join(f'lr {lr:g}' for lr in rates)} |"
    yield "|---" * (1 + len(rates)) + "|"
    for label in dict.fromkeys(row["label"] for row in rows):
        cells = []
        for lr in rates:
            run = [row for row in rows if (row["label"], row["lr"], row["seed"]) == (label, str(lr), "0")]
            shares = [solved(run, probes, size, depth) for size in sizes]
            cells.append(
                " and ".join(f"{share:.2f}" for (share,) in shares) if run else "to come" if lr in study.rates else ""
            )
        yield f"| {label} | {' | '.join(cells)} |"
    yield ""


def drawn(name, ours, curves, probes, speeds=()):
    """The figure of a study, and what there is to say about it."""
    from matplotlib.figure import Figure

    study = STUDIES[name]
    same_updates, same_time, _ = by_budget(name, ours, speeds)
    ours = same_updates or ours
    groups = list(chosen(ours))
    figure = Figure(figsize=(12, max(4.6, 1 + 0.35 * len(groups))), layout="constrained")
    left, right = figure.subplots(1, 2)
    said, legends = [], (left, right)
    if study.sizes:
        plot_solved(left, right, study, groups, probes)
    elif name == "states":
        plot_losses(left, groups, curves)
        said = differences(right, ours, curves)
    elif same_time:
        plot_scores(left, groups)
        left.set_title(f"{study.updates} updates each", fontsize=10)
        plot_scores(right, list(chosen(same_time)))
        right.set_title("the same time each", fontsize=10)
        legends = ()
    else:
        plot_losses(left, groups, curves)
        plot_scores(right, groups)
        left.set_title("colours as on the right", fontsize=10)
        legends = ()
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes in legends:  # below the panel, where it covers nothing
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2, frameon=False, fontsize=8)
    return figure, said


def named(groups):
    """Each group with its label, which has the number of updates where that differs, and with a colour of its own."""
    several = len({updates for (_, updates), *_ in groups}) > 1
    for i, ((label, updates), group, _) in enumerate(groups):
        yield f"{label}, {updates} updates" if several else label, group, COLOURS[i % len(COLOURS)]


def plot_losses(axes, groups, curves):
    for label, group, colour in named(groups):
        first = next(row["run"] for row in group if row["seed"] == "0")
        curve = [row for row in curves if row["run"] == first]
        updates, losses = ([float(row[key]) for row in curve] for key in ("update", "loss"))
        axes.plot(updates, losses, label=label, lw=1, color=colour)
    axes.set(xlabel="updates", ylabel="training loss, seed 0")


def plot_scores(axes, groups):
    labels = []
    for i, (label, group, colour) in enumerate(named(groups)):
        labels.append(textwrap.fill(label, 28))
        axes.plot([float(row["validation"]) for row in group], [i] * len(group), "o", color=colour, alpha=0.7)
    axes.set(yticks=range(len(groups)), xlabel=f"{groups[0][1][0]['metric']}, validation, each seed")
    axes.set_yticklabels(labels, fontsize=8)
    axes.invert_yaxis()


def plot_solved(left, right, study, groups, probes):
    """Of the first variant, which is the study's subject, every size; of all variants the second largest size."""
    (label, _), group, _ = groups[0]
    for size in study.sizes:
        means = [statistics.mean(solved(group, probes, size, depth)) for depth in study.depths]
        trained = " (trained on)" if size == study.sizes[0] else ""
        (line,) = left.plot(study.depths, means, "o-", label=f"{sized(study, size)}{trained}")
        if len(group) > 1:
            for depth in study.depths:
                values = solved(group, probes, size, depth)
                left.plot([depth] * len(values), values, "_", color=line.get_color(), ms=9, alpha=0.7)
    seeds = f", mean and each of {len(group)} seeds" if len(group) > 1 else ""
    left.set(title=f"{label}{seeds}", ylabel="puzzles solved")
    size = study.sizes[-2]
    for i, (label, group, colour) in enumerate(named(groups)):
        right.plot(
            study.depths,
            [statistics.mean(solved(group, probes, size, depth)) for depth in study.depths],
            "--" if group[0]["evaluations"] == "" else f"{MARKERS[i % len(MARKERS)]}-",
            label=textwrap.fill(label, 42),
            color=colour,
        )
    right.set(title=f"{sized(study, size)}, all variants")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set(xlabel="steps N (2 N evaluations of f)", ylim=(-0.03, 1.03), xticks=study.depths)
        axes.set_xticklabels(study.depths)
        axes.set_title(axes.get_title(), fontsize=10)
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")


def differences(axes, ours, curves):
    """How far the loss is from that of the stored graph, update by update. The loss is a float32: 0 is "less than a
    unit in its last place", about 1e-7, and not "the same computation"."""
    by_label = {
        row["label"]: {int(made["update"]): float(made["loss"]) for made in curves if made["run"] == row["run"]}
        for row in ours
    }
    stored, lines = by_label.pop("stored graph", {}), []
    for label, losses in by_label.items():
        updates = [update for update in losses if update in stored]
        apart = [abs(losses[update] - stored[update]) / stored[update] for update in updates]
        if apart:
            axes.plot(updates, [max(d, 1e-9) for d in apart], label=label, lw=1)
            shown = ", ".join(f"{apart[i]:.1e} at update {updates[i]}" for i in (0, len(apart) // 2, len(apart) - 1))
            lines += [f"{label}, relative distance of the loss from that of the stored graph: {shown}.", ""]
    axes.set(yscale="log", xlabel="updates", ylabel="distance of the loss from the stored graph's")
    return lines
