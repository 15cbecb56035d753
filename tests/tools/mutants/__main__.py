"""Puts one bug at a time into a copy of the repository and runs the tests there.

    python tests/tools/mutants [name ...]      all bugs, or those whose name contains one of these words
    python tests/tools/mutants --every-suite   does not stop at the first suite that notices a bug

Writes to results.md in this folder which test notices each bug, and fails if one goes unnoticed. An interrupted run is
resumed, unless kernels, tests or bugs have changed.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bugs import BUGS, Bug

REPOSITORY = Path(__file__).parents[3]
RESULTS = Path(__file__).parent / "results.md"
UNNOTICED = "nothing"

INTERPRETED = {
    "kernels/gpu.py": ["tests/kernels/test_kernels.py", "-k", "triton and (every_pair or every_beta)"],
    "kernels/passes.py": ["tests/kernels/test_kernels.py", "-k", "triton and (every_pair or every_beta)"],
    "kernels/gpu_exact.py": ["tests/solver/test_exact.py", "-k", "triton and (every or alarm)"],
}


def suites(file: str) -> dict[str, list[str]]:
    """The tests that may notice a bug in this file, the fastest first. Budgets are checked on one GPU."""
    return {
        "launches": ["tests/kernels/test_launch.py"] if file == "kernels/launch.py" else [],
        "emulator": ["tests/kernels/test_emulated_kernels.py", "--sample", "0"],
        "budgets": ["tests/kernels/test_gpu_code.py", "-k", "sm_90 or not (sm_ or gfx)"],
        "interpreter": INTERPRETED.get(file, []),
    }


@dataclass(frozen=True)
class Noticed:
    """A row of the table. by: the suites and their tests."""

    name: str
    file: str
    by: str
    seconds: float

    def __str__(self) -> str:
        return f"| {self.name} | {self.file} | {self.by} | {self.seconds:.0f} |"


def fingerprint() -> str:
    """A hash of the files that determine the results."""
    names = (
        "kernels/*.py",
        "tests/conftest.py",
        "tests/kernels/*.py",
        "tests/solver/test_exact.py",
        "tests/tools/**/*.py",
    )
    paths = sorted({path for name in names for path in REPOSITORY.glob(name)})
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]


def write(results: dict[str, Noticed]) -> None:
    rows = [results[bug.name] for bug in BUGS if bug.name in results]
    unnoticed = sum(row.by == UNNOTICED for row in rows)
    seconds = sum(row.seconds for row in rows)
    RESULTS.write_text(
        f"# {len(rows)} of {len(BUGS)} mutants, {unnoticed} unnoticed, {seconds / 60:.0f} minutes\n\n"
        f"Written by `make mutants`. The hash of kernels and tests is {fingerprint()}.\n\n"
        "| bug | file | noticed by | seconds |\n| --- | --- | --- | --- |\n" + "".join(f"{row}\n" for row in rows)
    )


def earlier() -> dict[str, Noticed]:
    """The results of an earlier run on the same files, by name."""
    text = RESULTS.read_text() if RESULTS.exists() else ""
    if fingerprint() not in text:
        return {}
    rows = re.findall(r"^\| (.+?) \| (kernels\S+) \| (.+) \| (\d+) \|$", text, re.MULTILINE)
    return {name: Noticed(name, file, by, float(seconds)) for name, file, by, seconds in rows}


def copy_repository(to: Path) -> None:
    """Copy it in the layout of an installation, which is then imported instead of the installed package."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "revdeq", to / "package/revdeq", ignore=ignore)
    shutil.copytree(REPOSITORY / "kernels", to / "package/revdeq/kernels", ignore=ignore)
    shutil.copytree(REPOSITORY / "tests", to / "tests", ignore=ignore)
    shutil.copy(REPOSITORY / "pyproject.toml", to)


def mutated(bug: Bug, text: str) -> str:
    """The text of its file with the bug."""
    for old, new in bug.edits:
        if text.count(old) != 1:
            raise SystemExit(f"{bug.name}: expected once in {bug.file}, but found {text.count(old)} times:\n{old}")
        text = text.replace(old, new)
    return text


def first_failure(arguments: list[str], where: Path) -> str | None:
    """The name of the first test that fails, or None."""
    environment = {**os.environ, "PYTHONPATH": str(where / "package"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *arguments]
    result = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True)
    if result.returncode == 0:
        return None
    if result.returncode < 0:
        return f"killed by signal {-result.returncode}"
    if result.returncode == 1 and (name := re.search(r"^(?:FAILED|ERROR) \S+::(\w+)", result.stdout, re.MULTILINE)):
        return name[1]
    raise SystemExit(f"{' '.join(command)} did not run:\n{result.stdout}{result.stderr}")


def notice(bug: Bug, every_suite: bool) -> Noticed:
    """Find the test that notices the bug, in the first suite or in every suite."""
    start, by = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        copy_repository(where)
        path = where / "package/revdeq" / bug.file
        path.write_text(mutated(bug, path.read_text()))
        for suite, arguments in suites(bug.file).items():
            if arguments and (every_suite or not by) and (test := first_failure(arguments, where)):
                by.append(f"{suite}: {test}")
    return Noticed(bug.name, bug.file, "; ".join(by) or UNNOTICED, time.perf_counter() - start)


def check_without_bugs(bugs: list[Bug]) -> None:
    """Check that every bug can be applied, and that the tests pass without bugs."""
    for bug in bugs:
        mutated(bug, (REPOSITORY / bug.file).read_text())
    with tempfile.TemporaryDirectory() as folder:
        copy_repository(Path(folder))
        for arguments in {tuple(x) for bug in bugs for x in suites(bug.file).values() if x}:
            if failure := first_failure([*arguments], Path(folder)):
                raise SystemExit(f"{failure} fails without any bug")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--every-suite", action="store_true")
    arguments = parser.parse_args()
    bugs = [bug for bug in BUGS if not arguments.names or any(name in bug.name for name in arguments.names)]
    if not bugs:
        parser.error(f"no name of a bug contains {arguments.names}: {', '.join(bug.name for bug in BUGS)}")
    results = earlier()
    left = bugs if arguments.names else [bug for bug in bugs if bug.name not in results]
    check_without_bugs(left)
    for bug in left:
        results[bug.name] = notice(bug, arguments.every_suite)
        print(results[bug.name], flush=True)
        write(results)
    unnoticed = [bug.name for bug in bugs if results[bug.name].by == UNNOTICED]
    if unnoticed:
        print(f"\n{len(unnoticed)} of {len(bugs)} go unnoticed: {', '.join(unnoticed)}")
        return 1
    print(f"\nAll {len(bugs)} are noticed.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
