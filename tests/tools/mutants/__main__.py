"""Puts one bug at a time into a copy of the repository and runs the tests there.

    python tests/tools/mutants [name ...]    all bugs, or those whose name or file contains one of these words

Writes which test notices each bug to results.csv, and a summary to results.md, and fails if one goes unnoticed without
an explanation.
Bugs in C and in the wrapper are noticed by tests that `make test` runs; those in Triton's kernels by an emulator, by
budgets of machine code, or by an interpreter. The test that noticed a bug before runs first, alone; then all: those
whose names share most words with the bug's, and those that noticed bugs of the same file. A result holds until the file
of the bug or that of the test changes, so that an interrupted run resumes. Each run is a fork of this process, which
has imported torch.
"""

import argparse
import csv
import hashlib
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import pytest
import torch  # noqa: F401
from bugs import BUGS, EQUIVALENT, GONE, REPOSITORY, Bug
from drawn import DRAWN

RESULTS = Path(__file__).parent / "results.csv"
UNNOTICED = "nothing"
ALL = (*BUGS, *DRAWN)


def suite(file: str) -> list[str]:
    """The tests that may notice a bug in this file, as arguments of pytest."""
    if file.startswith("revdeq/"):
        return sorted(path.relative_to(REPOSITORY).as_posix() for path in REPOSITORY.glob("tests/solver/test_*.py"))
    if file.startswith("kernels/cpu/"):
        return ["tests/kernels/test_kernels.py", "tests/solver/test_exact.py", "-k", "not triton"]
    names = ("emulated_kernels", "gpu_code", "launch", "kernels")
    return [*(f"tests/kernels/test_{name}.py" for name in names), "-k", "not (cpu or gfx)"]


def area(bug: Bug) -> str:
    if bug.file.startswith("revdeq/"):
        return "the wrapper, drawn" if bug in DRAWN else "the wrapper"
    return "C" if bug.file.startswith("kernels/cpu/") else "Triton"


class Noticed(NamedTuple):
    """A row of results.csv. by: the file and the name of a test. key: a hash of what the result depends on."""

    name: str
    file: str
    by: str
    seconds: float
    key: str


def fingerprint(bug: Bug, by: str) -> str:
    """Of the file with the bug, and of the test that noticed it; without one, of all tests."""
    test = REPOSITORY / by.partition("::")[0]
    tests = [test] if test.is_file() else sorted(REPOSITORY.glob("tests/[ks]*/test_*.py"))
    return hashlib.sha256("".join([bug.text(), *(x.read_text() for x in tests)]).encode()).hexdigest()[:12]


def earlier() -> dict[str, Noticed]:
    """The rows of earlier runs, by name."""
    with RESULTS.open(newline="") as file:
        return {name: Noticed(name, *row, float(s), key) for name, *row, s, key in csv.reader(file)}


def write(results: dict[str, Noticed]) -> None:
    rows = [(bug, results[bug.name]) for bug in ALL if bug.name in results]
    with RESULTS.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(row for _, row in rows)
    lines = ["# How many of the seeded bugs are noticed", "", "Written by `make mutants`.", ""]
    lines += ["| bugs in | noticed | of | minutes |", "| --- | --- | --- | --- |"]
    for name in dict.fromkeys(map(area, ALL)):
        found = [row for bug, row in rows if area(bug) == name]
        count, minutes = sum(row.by != UNNOTICED for row in found), sum(row.seconds for row in found) / 60
        lines.append(f"| {name} | {count} | {sum(area(bug) == name for bug in ALL)} | {minutes:.0f} |")
    for row in (row for _, row in rows if row.by == UNNOTICED):
        lines += ["", f"Unnoticed: {row.name}: {EQUIVALENT.get(row.name, 'no test notices it')}"]
    lines += ["", "Gone, because their mechanism is gone:", "", *(f"- {x}" for x in GONE), ""]
    RESULTS.with_suffix(".md").write_text("\n".join(lines))


def copy_repository(to: Path) -> None:
    """Copy it in the layout of an installation, which is then imported instead of the installed package."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "revdeq", to / "package/revdeq", ignore=ignore)
    shutil.copytree(REPOSITORY / "kernels", to / "package/revdeq/kernels", ignore=ignore)
    shutil.copytree(REPOSITORY / "tests", to / "tests", ignore=ignore)
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(REPOSITORY / name, to)
    for name in ("bench", "docs"):
        (to / name).symlink_to(REPOSITORY / name)
    for name in ("revdeq", "revdeq/kernels"):
        (to / Path(name).name).symlink_to(to / "package" / name)


def build(where: Path) -> None:
    """Compile the C files of a copy."""
    for library in (libraries := list((where / "kernels").glob("_cpu*"))):
        library.unlink()
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", "package"]
    subprocess.run(command, cwd=where, check=True, capture_output=True)
    if not libraries or not all(library.exists() for library in libraries):
        raise SystemExit("it does not compile")


def words_of(text: str) -> set[str]:
    """Those of more than four letters."""
    return set(re.findall(r"[a-z]{5,}", text.lower()))


class Watch:
    """A plugin of pytest that runs tests with these words first, then `first`, or only these; and keeps the failure."""

    wrong: ClassVar[set[str]] = set()
    """The tests that fail without any bug."""

    def __init__(self, first: Sequence[str], only: bool = False, words: str = ""):
        self.first, self.only, self.words, self.failure = first, only, words_of(words), None

    def pytest_collection_modifyitems(self, items):
        names = {x: name for x in items if (name := x.nodeid.partition("[")[0]) not in self.wrong}
        places = {x: self.first.index(name) for x, name in names.items() if name in self.first}
        items[:] = places if self.only else names
        items.sort(key=lambda x: (-len(self.words & words_of(x.nodeid)), places.get(x, len(self.first))))

    def pytest_runtest_setup(self, item):
        Path("test.txt").write_text(item.nodeid.partition("[")[0])
        signal.alarm(200)  # then the process is killed

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failure = report.nodeid.partition("[")[0]

    pytest_collectreport = pytest_runtest_logreport


def run_tests(arguments: list[str], where: Path, watch: Watch, sender) -> None:
    """In a process of its own."""
    output = os.open(where / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(where)
    Path("test.txt").write_text("import revdeq")
    sys.path.insert(0, str(where / "package"))
    os.environ["PYTHONPATH"] = sys.path[0]
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--rootdir", str(where), *arguments], plugins=[watch])
    if not watch.failure and code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        watch.failure = re.search("ImportError while loading conftest", (where / "output.txt").read_text())[0]
    sender.send(watch.failure)
    os._exit(0)


def first_failure(arguments: list[str], where: Path, watch: Watch) -> str | None:
    """The file and the name of the first test that fails, or None."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=run_tests, args=(arguments, where, watch, sender))
    process.start()
    process.join()
    if process.exitcode > 0:
        raise SystemExit((where / "output.txt").read_text())
    return (where / "test.txt").read_text() if process.exitcode else receiver.recv()


def fails_alone(test: str, bug: Bug, where: Path) -> str | None:
    """What first_failure returns for one of the tests that may notice the bug."""
    file = test.partition("::")[0]
    arguments = [x for x in suite(bug.file) if x == file or not x.startswith("tests/")]
    return first_failure(arguments, where, Watch([test], only=True)) if file in arguments else None


def notice(bug: Bug, where: Path, results: dict[str, Noticed]) -> Noticed:
    """Find the test that notices the bug: the one that did before, or else one of all."""
    start, sys.dont_write_bytecode = time.perf_counter(), True
    similar = [x for x, _ in Counter(row.by for row in results.values() if row.file == bug.file).most_common()]
    (where / bug.file).write_text(bug.text())
    if bug.file.endswith((".c", ".h")):
        build(where)
    by = fails_alone(results[bug.name].by, bug, where) if bug.name in results else None
    by = by or first_failure(suite(bug.file), where, Watch(similar, words=bug.name))
    for restored in (bug.file, *(x.relative_to(REPOSITORY) for x in REPOSITORY.glob("kernels/_cpu*"))):
        shutil.copy2(REPOSITORY / restored, where / restored)
    by, sys.dont_write_bytecode = by or UNNOTICED, False
    return Noticed(bug.name, bug.file, by, round(time.perf_counter() - start), fingerprint(bug, by))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    bugs = [b for b in ALL if not arguments.names or any(x in f"{b.name} {b.file}" for x in arguments.names)]
    results = earlier()
    left = [b for b in bugs if not (row := results.get(b.name)) or row.key != fingerprint(b, row.by)]
    pytest.main(["--version"])  # imports its plugins
    with tempfile.TemporaryDirectory() as folder:
        where, right = Path(folder), {UNNOTICED}
        copy_repository(where)
        for bug in left:
            while (row := notice(bug, where, earlier())).by not in right and fails_alone(row.by, bug, where):
                print(f"{row.by} fails without any bug", flush=True)
                Watch.wrong.add(row.by)
            right.add(row.by)
            print(*row, sep=", ", flush=True)
            write({**earlier(), row.name: row})
    results = earlier()
    unnoticed = [bug.name for bug in bugs if results[bug.name].by == UNNOTICED and bug.name not in EQUIVALENT]
    print(f"\n{len(unnoticed)} of {len(bugs)} go unnoticed without an explanation", *unnoticed, sep="\n- ")
    return 1 if unnoticed or Watch.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
