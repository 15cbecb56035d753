"""The measurements of a run: one long table, a row for each."""

import argparse
import csv
import os
import re
import statistics
import subprocess
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

import revdeq
from revdeq import _device

ROOT = Path(__file__).parent


@dataclass
class Row:
    """`size` is elements in the microbenchmarks and steps N elsewhere; `quantity` is what p20, p50 and p80 are of:
    seconds, bytes, an error, a ratio or a count; `bytes_moved` is the least that the computation has to read and
    write."""

    benchmark: str
    provider: str
    size: int
    dtype: str
    quantity: str
    p20: float
    p50: float
    p80: float
    bytes_moved: int | None
    device: str
    torch: str
    triton: str
    revdeq: str
    commit: str

    @property
    def key(self) -> tuple[str, str, int, str, str]:
        return self.benchmark, self.provider, self.size, self.dtype, self.quantity


def device() -> torch.device:
    return _device.best()


def device_name() -> str:
    name = _device.name(device())
    return name if device().type != "cpu" else f"{name}, {torch.get_num_threads()} threads"


def results_folder() -> Path:
    """bench/results/<device>/"""
    return ROOT / "results" / re.sub(r"[^a-z0-9]+", "-", device_name().lower()).strip("-")


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return ""
    return triton.__version__


def _commit() -> str:
    """The commit, and whether what is measured or what measures it has changed since."""

    def git(*words):
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", ":/kernels", ":/revdeq", ":/bench/*.py")
        return git("describe", "--always", "--exclude=*") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


class Table:
    """Rows are written as they are measured, so that an interrupted run loses nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._where = device_name(), torch.__version__, _triton_version(), revdeq.__version__, _commit()
        if not path.exists():
            with path.open("w", newline="") as file:
                csv.writer(file).writerow(field.name for field in fields(Row))

    def add(
        self,
        benchmark: str,
        provider: str,
        size: int,
        quantity: str,
        values: list[float],
        dtype: str = "float32",
        bytes_moved: int | None = None,
    ) -> None:
        row = Row(benchmark, provider, size, dtype, quantity, *percentiles(values), bytes_moved, *self._where)
        with self.path.open("a", newline="") as file:
            csv.writer(file).writerow(asdict(row).values())


def options(description: str, quick: str) -> tuple[Table | None, bool]:
    """The options of every benchmark: a table to add to, and whether to be quick."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, help="the CSV to add the measurements to")
    parser.add_argument("--quick", action="store_true", help=quick)
    arguments = parser.parse_args()
    return Table(arguments.table) if arguments.table else None, arguments.quick


def percentiles(values: list[float]) -> tuple[float, float, float]:
    """The 20th, the 50th and the 80th."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return tenths[1], tenths[4], tenths[7]


def read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    expected = [field.name for field in fields(Row)]
    if rows and list(rows[0]) != expected:
        raise ValueError(f"{path} has the columns {list(rows[0])}: it must have {expected}; is it such a table?")
    return [_parsed(row) for row in rows]


def _parsed(row: dict[str, str]) -> Row:
    numbers = {name: float(row[name]) for name in ("p20", "p50", "p80")}
    moved = int(row["bytes_moved"]) if row["bytes_moved"] else None
    return Row(**{**row, **numbers, "size": int(row["size"]), "bytes_moved": moved})


def write(path: Path, rows: list[Row]) -> None:
    part = path.with_suffix(".part")
    with part.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(field.name for field in fields(Row))
        writer.writerows(asdict(row).values() for row in rows)
    os.replace(part, path)
