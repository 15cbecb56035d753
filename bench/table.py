"""The measurements of a benchmark: a row for each in one long table, and the tables of the pages that quote it.

A benchmark is one file with `measure(results, quick)`, which adds rows, and `table(results)`, which returns Markdown;
some have `picture(results)`, too, which returns a figure.
"""

import argparse
import csv
import re
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

import revdeq
from revdeq import _device

ROOT = Path(__file__).parent


@dataclass(frozen=True)
class Row:
    """`size` is elements in the microbenchmarks and steps N elsewhere; `quantity` is what the 20th, 50th and 80th
    percentile are of: seconds, bytes, an error, a ratio or a count."""

    benchmark: str
    method: str
    size: int
    quantity: str
    p20: float
    p50: float
    p80: float
    device: str
    torch: str
    triton: str
    revdeq: str
    commit: str


class Results:
    """The rows of one file. A row is written when it is added, so that an interrupted run loses nothing."""

    def __init__(self, path: Path | None = None) -> None:
        self.path, self.rows = path, read(path) if path is not None and path.exists() else []
        self._where: tuple[str, ...] = ()

    def add(self, benchmark: str, method: str, size: int, quantity: str, values: Sequence[float]) -> None:
        self._where = self._where or (device_name(), torch.__version__, _triton(), revdeq.__version__, _commit())
        row = Row(benchmark, method, size, quantity, *percentiles(values), *self._where)
        if self.path is not None:
            with self.path.open("a", newline="") as file:
                writer = csv.writer(file)
                if not self.rows:
                    writer.writerow(field.name for field in fields(Row))
                writer.writerow(asdict(row).values())
        self.rows.append(row)

    def median(self, benchmark: str, method: str, size: int, quantity: str) -> float:
        """NaN if it was not measured."""
        return self.by_size(benchmark, method, quantity).get(size, float("nan"))

    def by_size(self, benchmark: str, method: str, quantity: str) -> dict[int, float]:
        """Medians, in the order of the sizes."""
        wanted = benchmark, method, quantity
        return {
            r.size: r.p50
            for r in sorted(self.rows, key=lambda r: r.size)
            if (r.benchmark, r.method, r.quantity) == wanted
        }

    def methods(self, benchmark: str) -> list[str]:
        return list(dict.fromkeys(r.method for r in self.rows if r.benchmark == benchmark))


def read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    expected = [field.name for field in fields(Row)]
    if rows and list(rows[0]) != expected:
        raise ValueError(f"{path} has the columns {list(rows[0])}, not {expected}: delete it, and measure again")
    numbers = ("p20", "p50", "p80")
    return [Row(**{**row, "size": int(row["size"]), **{name: float(row[name]) for name in numbers}}) for row in rows]


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The 20th, the 50th and the 80th."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return tenths[1], tenths[4], tenths[7]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are aligned, to be read in a terminal, too. NaN is an empty cell."""
    cells = [["" if cell == "nan" else cell for cell in row] for row in (header, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells)


def main(
    description: str,
    measure: Callable[[Results, bool], None],
    table: Callable[[Results], str],
) -> None:
    """The command line of a benchmark: it measures, and prints its table."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the CSV to add the measurements to")
    parser.add_argument("--quick", action="store_true", help="few sizes, methods and rounds")
    arguments = parser.parse_args()
    results = Results(arguments.out)
    measure(results, arguments.quick)
    print(table(results))


def device() -> torch.device:
    return _device.best()


def device_name() -> str:
    return _device.name(device())


def results_folder() -> Path:
    """bench/results/<device>/"""
    return ROOT / "results" / re.sub(r"(?:\(r\)|[^a-z0-9])+", "-", device_name().lower()).strip("-")


def _triton() -> str:
    try:
        import triton
    except ImportError:
        return ""
    return triton.__version__


def _commit() -> str:
    """The commit, and whether what is measured or what measures it has changed since."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", ":/kernels", ":/revdeq", ":/bench/*.py")
        return git("describe", "--always", "--exclude=*") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return ""
