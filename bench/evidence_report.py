"""Tables and plots of the rows that evidence.py wrote; rows of stale or spliced runs are refused."""

import collections
import json
import statistics
import textwrap

from evidence import EDITION, STUDIES, Task, equal_time, goodness, table, variants
from matplotlib.figure import Figure

SEEDS = "the mean over seeds, and where they differ, the range"
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


def table_of(*heads):
    return [line(*heads), "|---" * len(heads) + "|"]


def line(*cells):
    return f"| {' | '.join(map(str, cells))} |"


def spread(values):
    """The mean of a few seeds and how far they are apart: perplexities to a tenth, shares to a thousandth."""
    mean = statistics.mean(values)
    digits = 1 if mean > 1 else 3
    return f"{mean:.{digits}f}" + (f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


def chosen(rows):
    """Of the rows of a study, by label and updates: those with the best learning rate, and how many were tried. The
    best is the best in the mean over seeds, of the rates with the most of them: if only one has all, this is the one
    that was best at seed 0."""
    groups = collections.defaultdict(lambda: collections.defaultdict(list))
    for row in rows:
        groups[row["label"], row["updates"]][row["lr"]].append(row)
    order = [str(lr) for lr in STUDIES[rows[0]["study"]].rates] if rows else []
    for key, by_rate in groups.items():
        first = [lr for lr, group in by_rate.items() if any(row["seed"] == "0" for row in group)]
        if not first:
            continue
        first.sort(key=lambda lr: order.index(lr) if lr in order else len(order))
        most = max(len(by_rate[lr]) for lr in first)
        means = {lr: statistics.mean(map(goodness, by_rate[lr])) for lr in first if len(by_rate[lr]) == most}
        best = max(means, key=means.get)  # the first of equals
        yield key, by_rate[best], len(first)


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
        lines += [f"![{name}]({name}.png)", ""]
        commands = [row["command"] for _, group, _ in chosen(ours) for row in group if row["seed"] == "0"]
        lines += folded("The commands", ["```", *commands, "```"])
        figure, said = drawn(name, ours, curves, probes, speeds)
        figure.savefig(results / f"{name}.png", dpi=120)
        lines += said
    if runs is not None and (lines_begun := list(begun(runs))):
        lines += ["## Still in training", "", *lines_begun, ""]
    page = results / "README.md"
    written = page.read_text(encoding="utf-8").partition(MADE)[0] if page.exists() else ""
    page.write_text(written + "\n".join(lines).rstrip() + "\n", encoding="utf-8")
    print("\n".join(lines))


def folded(title, lines):
    """A part of the page that is shown when its title is clicked."""
    return ["<details>", f"<summary>{title}</summary>", "", *lines, "", "</details>", ""]


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
    yield from table_of(
        "", "updates", "seeds", "lr", "parameters", "evaluations", f"{metric}, validation", f"{metric}, test"
    )
    for (label, updates), group, tried in chosen(ours):
        evaluations = {f"{float(row['evaluations']):.3g}" if row["evaluations"] else "" for row in group}
        yield line(
            label,
            updates,
            len(group),
            rate(group, tried, wanted),
            f"{int(group[0]['parameters']):,}",
            ", ".join(evaluations),
            *(spread([float(row[key]) for row in group]) for key in ("validation", "test")),
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


def shares(group, probes, size, depth):
    values = solved(group, probes, size, depth)
    low, high = min(values), max(values)
    return f"{statistics.mean(values):.2f}" + (f" ({low:.2f} to {high:.2f})" if low < high else "")


def sized(study, size):
    return f"{size} x {size} cells" if study.size == "cells" else f"{size} {study.size}"


def puzzle_lines(name, rows, probes, memory):
    """Every size and number of steps of the first variant, which is the study's subject, with the memory that it takes;
    all variants at the largest number of steps; and, folded, everything."""
    study, groups = STUDIES[name], list(chosen(rows))
    (label, _), group, _ = groups[0]
    yield f"**{label}**: solved puzzles of each size by the number of steps, {SEEDS}."
    yield ""
    yield from table_of("", *(f"N = {depth}" for depth in study.depths))
    for size in study.sizes:
        yield line(sized(study, size), *(shares(group, probes, size, depth) for depth in study.depths))
    for solver, words in (("reversible", "the reversible solver"), ("stored", "a stored graph")):
        taken = {
            row["max_steps"]: int(row["bytes"]) for row in memory if row["study"] == name and row["solver"] == solver
        }
        if taken:
            cells = (f"{taken[str(depth)] / 2**20:.1f} MiB" for depth in study.depths)
            yield line(f"memory of an update by {words}, {sized(study, study.sizes[0])}", *cells)
    yield ""
    depth = study.depths[-1]
    yield f"**All variants**: solved puzzles of each size with N = {depth}, {SEEDS}. The learning rate is the best for"
    yield f"{sized(study, study.sizes[-2])} of the validation set."
    yield ""
    yield from table_of("", "seeds", "lr", "parameters", *(sized(study, size) for size in study.sizes))
    for (label, _), group, tried in groups:
        words = label, len(group), rate(group, tried, len(study.rates)), f"{int(group[0]['parameters']):,}"
        yield line(*words, *(shares(group, probes, size, depth) for size in study.sizes))
    yield ""
    yield from folded("All variants at every number of steps", every_line(study, groups, probes))
    yield from folded("All variants at every learning rate", rate_lines(study, rows, probes))


def every_line(study, groups, probes):
    yield from table_of("", "size", *(f"N = {depth}" for depth in study.depths))
    for (label, _), group, _ in groups:
        for size in study.sizes:
            yield line(label, sized(study, size), *(shares(group, probes, size, depth) for depth in study.depths))


def rate_lines(study, rows, probes):
    """The larger puzzles at every learning rate: a variant is not behind because it was given the wrong one."""
    rows = [row for row in rows if int(row["updates"]) == study.updates]
    sizes, depth = study.sizes[-2:], study.depths[-1]
    rates = sorted({*study.rates, *(float(row["lr"]) for row in rows)})
    yield (
        f"Solved puzzles of {' and of '.join(sized(study, size) for size in sizes)} with N = {depth}, {SEEDS}: one "
        "seed but at the best rate, and where an earlier choice was another."
    )
    yield ""
    yield from table_of("", *(f"lr {lr:g}" for lr in rates))
    for label in dict.fromkeys(row["label"] for row in rows):
        cells = []
        for lr in rates:
            run = [row for row in rows if (row["label"], row["lr"]) == (label, str(lr))]
            found = " and ".join(shares(run, probes, size, depth) for size in sizes) if run else ""
            cells.append(found or ("to come" if lr in study.rates else ""))
        yield line(label, *cells)


def drawn(name, ours, curves, probes, speeds=()):
    """The figure of a study, and what there is to say about it."""
    study = STUDIES[name]
    if study.sizes:
        return solved_figure(study, list(chosen(ours)), probes), []
    if name == "states":
        return states_figure(ours, curves)
    return scores_figure(study, by_budget(name, ours, speeds)), []


def states_figure(ours, curves):
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    plot_losses(left, list(chosen(ours)), curves)
    said = differences(right, ours, curves)
    for axes in (left, right):
        axes.grid(alpha=0.3)  # and the legend below the panel, where it covers nothing
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2, frameon=False, fontsize=8)
    return figure, said


def plot_losses(axes, groups, curves):
    for (label, _), group, _ in groups:
        first = next(row["run"] for row in group if row["seed"] == "0")
        curve = [row for row in curves if row["run"] == first]
        updates, losses = ([float(row[key]) for row in curve] for key in ("update", "loss"))
        axes.plot(updates, losses, label=label, lw=1)
    axes.set(xlabel="updates", ylabel="training loss, seed 0")


def scores_figure(study, budgets):
    """A panel for each budget, with the same variants below each other in all of them."""
    titles = f"{study.updates} updates each", "the same time each", "longer trainings"
    panels = [(title, list(chosen(rows))) for title, rows in zip(titles, budgets, strict=True) if rows]
    labels = list(dict.fromkeys(label for _, groups in panels for (label, _), *_ in groups))
    figure = Figure(figsize=(12, 1 + 0.45 * len(labels)), layout="constrained")
    columns = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, groups) in zip(columns, panels, strict=True):
        longest = {updates for (_, updates), *_ in groups}
        for (label, _), group, _ in groups:
            i = labels.index(label)
            axes.plot([float(row["validation"]) for row in group], [i] * len(group), "o", color=f"C{i % 10}", alpha=0.7)
        if title == titles[2] and len(longest) == 1:
            title = f"{int(*longest):,} updates each"
        axes.set(xlabel=f"{groups[0][1][0]['metric']}, validation, each seed")
        axes.set_title(title, fontsize=10)
        axes.margins(x=0.1)
        axes.grid(alpha=0.3)
    axes.set_yticks(range(len(labels)), [textwrap.fill(label, 34) for label in labels], fontsize=8)
    axes.invert_yaxis()
    return figure


def solved_figure(study, groups, probes):
    """A panel for each variant: the mean of its seeds against the number of steps, and a bar from the worst seed to the
    best."""
    columns = 4
    rows = -(-len(groups) // columns)
    figure = Figure(figsize=(12, 0.9 + 2.4 * rows), layout="constrained")
    panels = iter(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    for ((label, _), group, _), axes in zip(groups, panels, strict=False):
        for size in study.sizes:
            values = [solved(group, probes, size, depth) for depth in study.depths]
            (means,) = axes.plot(study.depths, list(map(statistics.mean, values)), "o-", ms=4, lw=1.2)
            axes.vlines(study.depths, list(map(min, values)), list(map(max, values)), color=means.get_color())
        words = label.replace(" = ", "\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}")  # not to be torn apart
        axes.set_title(textwrap.fill(words, 38), fontsize=8)
        axes.set_xscale("log", base=2)
        axes.set_xticks(study.depths, study.depths, fontsize=8)
        axes.set_yticks([0, 0.5, 1], ["0 %", "50 %", "100 %"], fontsize=8)
        axes.set_ylim(-0.05, 1.05)
        axes.minorticks_off()
        axes.tick_params(labelbottom=True)
        axes.grid(alpha=0.3)
    for axes in panels:  # in the last row, beyond the last variant
        axes.set_visible(False)
    names = [sized(study, size) + " (trained on)" * (size == study.sizes[0]) for size in study.sizes]
    figure.legend(figure.axes[0].lines, names, loc="outside lower center", ncols=len(names), frameon=False, fontsize=9)
    fewest, most = (count(len(group) for _, group, _ in groups) for count in (min, max))
    seeds = f"{most} seed{'s' * (most > 1)}" if fewest == most else f"{fewest} to {most} seeds"
    figure.suptitle(f"puzzles solved against steps N (2 N evaluations of f): {seeds}, mean and range", fontsize=10)
    return figure


def differences(axes, ours, curves):
    """How far the loss is from that of the stored graph, update by update. The loss is a float32: 0 is "less than a
    unit in its last place", about 1e-7, and not "the same computation"."""
    by_label = {
        row["label"]: {int(made["update"]): float(made["loss"]) for made in curves if made["run"] == row["run"]}
        for row in ours
    }
    stored, lines = by_label.get("stored graph", {}), []
    for i, (label, losses) in enumerate(by_label.items()):
        if losses is stored:
            continue
        updates = [update for update in losses if update in stored]
        apart = [abs(losses[update] - stored[update]) / stored[update] for update in updates]
        if apart:
            axes.plot(updates, [max(d, 1e-9) for d in apart], label=label, lw=1, color=f"C{i}")  # as on the left
            lines.append(line(label, *(f"{statistics.median(part):.1e}" for part in (apart[:10], apart[-100:]))))
    axes.set(yscale="log", xlabel="updates", ylabel="distance of the loss from the stored graph's")
    if lines:
        heads = "distance of the loss from the stored graph's, median", "first 10 updates", "last 100 updates"
        lines = [*table_of(*heads), *lines, ""]
    return lines
