"""README.md and docs/ show the tables and pictures of this machine: `python bench/pages.py`, after make bench.

A table is between `<!-- numbers: NAME -->` and `<!-- /numbers -->`, where NAME is a benchmark, or one and its function:
`step` is the table of bench/step.py, `step.short` another.
"""

import json
import re
from pathlib import Path

import run
from table import Results, results_folder

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
PICTURES = re.compile(r"(bench/results)/([\w-]+)(?=/\w+(?:-dark)?\.png)")
MARKS = re.compile(r"(<!-- numbers: ([\w.]+) -->\n).*?(<!-- /numbers -->)", re.DOTALL)


def quoted():
    """The folder of the measurements that the pages show."""
    return ROOT / PICTURES.search(PAGES[0].read_text(encoding="utf-8"))[0]


def written(name, folder):
    """The lines for a mark, or none if the benchmark has not been run."""
    if name == "machine":
        machine = json.loads((folder / "machine.json").read_text())
        device, torch = machine["device"].replace("(R)", ""), machine["torch"].split("+")[0]
        return f"Measured on {machine['cores']} cores of an {device} with torch {torch}.\n"
    benchmark, _, function = name.partition(".")
    rows = folder / f"{benchmark}.csv"
    return getattr(run.module(benchmark), function or "table")(Results(rows)) + "\n" if rows.exists() else ""


def filled(text, folder):
    text = PICTURES.sub(rf"\1/{folder.name}", text)
    return MARKS.sub(lambda found: found[1] + written(found[2], folder) + found[3], text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8"), results_folder()), encoding="utf-8")
