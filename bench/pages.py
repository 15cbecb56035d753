"""Writes the tables of README.md and docs/ from the rows in bench/results: `python bench/pages.py`, after make bench.

A table is between `<!-- numbers: NAME -->` and `<!-- /numbers -->`, where NAME is a benchmark, or one and its function:
`step` is the table of bench/step.py, `step.short` another.
"""

import json
import re
from pathlib import Path

import run
from table import Results

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
RESULTS = ROOT / "bench" / "results" / "intel-xeon-processor-2-threads"
"""The measurements that the pages quote."""
MARKS = re.compile(r"(<!-- numbers: ([\w.]+) -->\n).*?(<!-- /numbers -->)", re.DOTALL)


def written(name, folder=RESULTS):
    """The lines for a mark, or none if the benchmark has not been run."""
    if name == "machine":
        machine = json.loads((folder / "machine.json").read_text())
        device, torch = machine["device"].split(",")[0].replace("(R)", ""), machine["torch"].split("+")[0]
        return f"Measured on {machine['cores']} cores of an {device} with torch {torch}.\n"
    benchmark, _, function = name.partition(".")
    rows = folder / f"{benchmark}.csv"
    return getattr(run.module(benchmark), function or "table")(Results(rows)) + "\n" if rows.exists() else ""


def filled(text, folder=RESULTS):
    return MARKS.sub(lambda found: found[1] + written(found[2], folder) + found[3], text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
