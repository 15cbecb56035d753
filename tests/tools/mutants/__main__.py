"""Puts one bug at a time into a copy of the repository and runs the tests there.

    python tests/tools/mutants [name ...]    all bugs, or those whose name or file contains one of these words
    python tests/tools/mutants --jobs 2      two at a time

Writes to results.md in this folder which test notices each bug, and fails if one goes unnoticed without an explanation.
Bugs in C and in the wrapper are noticed by tests that `make test` runs; those in Triton's kernels by an emulator, by
budgets of machine code, or by an interpreter. Tests that noticed similar bugs come first, and then fast ones. A result
holds until the file of the bug or that of the test changes, so that an interrupted run resumes.
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
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from bugs import BUGS, EQUIVALENT, GONE, Bug
from drawn import DRAWN

REPOSITORY = Path(__file__).parents[3]
RESULTS = Path(__file__).parent / "results.md"
UNNOTICED = "nothing"

ALL = (*BUGS, *DRAWN)

WRAPPER = sorted(path.relative_to(REPOSITORY).as_posix() for path in REPOSITORY.glob("tests/solver/test_*.py"))


def suites(file: str) -> list[list[str]]:
    """The tests that may notice a bug in this file. Budgets are checked on one GPU."""
    if file.startswith("revdeq/"):
        return [WRAPPER]
    if file.startswith("kernels/cpu/"):
        return [["tests/kernels/test_kernels.py", "tests/solver/test_exact.py", "-k", "not triton"]]
    return [
        *([["tests/kernels/test_launch.py"]] if file == "kernels/gpu/launch.py" else []),
        ["tests/kernels/test_emulated_kernels.py", "--sample", "0"],
        ["tests/kernels/test_gpu_code.py", "-k", "sm_90 or not (sm_ or gfx)"],
        ["tests/kernels/test_kernels.py", "-k", "triton"],
    ]


def area(bug: Bug) -> str:
    if bug.file.startswith("revdeq/"):
        return "the wrapper, drawn" if bug in DRAWN else "the wrapper"
    return "C" if bug.file.startswith("kernels/cpu/") else "Triton"


@dataclass(frozen=True)
class Noticed:
    """A row of the table. by: the file and the name of a test. key: a hash of what the result depends on."""

    name: str
    file: str
    by: str
    seconds: float
    key: str = ""

    def __str__(self) -> str:
        name = self.name.replace("|", "\\|")
        return f"| {name} | {self.file} | {self.by} | {self.seconds:.0f} | {self.key} |"


def mutated(bug: Bug) -> str:
    """The text of its file with the bug."""
    text = (REPOSITORY / bug.file).read_text()
    for old, new in bug.edits:
        if text.count(old) != 1:
            raise SystemExit(f"{bug.name}: expected once in {bug.file}, but found {text.count(old)} times:\n{old}")
        text = text.replace(old, new)
    return text


def fingerprint(bug: Bug, by: str) -> str:
    """Of the file with the bug, and of the test that noticed it; without one, of all tests."""
    test = REPOSITORY / by.partition("::")[0]
    tests = [test] if test.is_file() else sorted(REPOSITORY.glob("tests/[ks]*/test_*.py"))
    return hashlib.sha256("".join([mutated(bug), *(x.read_text() for x in tests)]).encode()).hexdigest()[:12]


def earlier() -> dict[str, Noticed]:
    """The rows of earlier runs, by name."""
    text = RESULTS.read_text() if RESULTS.exists() else ""
    rows = re.findall(r"^\| (.+) \| (\S+/\S+) \| (.+) \| (\d+) \| (\w+) \|$", text, re.MULTILINE)
    return {x.replace("\\|", "|"): Noticed(x.replace("\\|", "|"), *more, float(s), k) for x, *more, s, k in rows}


def explained(name: str) -> str | None:
    """Why a bug makes no difference. The number and the line of one that was drawn may change."""
    return EQUIVALENT.get(re.sub(r"^random \d+: (\S+):\d+", r"\1", name))


def write(results: dict[str, Noticed]) -> None:
    rows = [(bug, results[bug.name]) for bug in ALL if bug.name in results]
    lines = ["# Which test notices each bug", "", "Written by `make mutants`.", ""]
    lines += ["| bugs in | noticed | of | minutes |", "| --- | --- | --- | --- |"]
    for name in dict.fromkeys(map(area, ALL)):
        found = [row for bug, row in rows if area(bug) == name]
        count, minutes = sum(row.by != UNNOTICED for row in found), sum(row.seconds for row in found) / 60
        lines.append(f"| {name} | {count} | {sum(area(bug) == name for bug in ALL)} | {minutes:.0f} |")
    if survivors := [row.name for _, row in rows if row.by == UNNOTICED]:
        lines += ["", "Unnoticed:", "", *(f"- {name}: {explained(name) or 'no test notices it'}" for name in survivors)]
    lines += ["", "Gone, because their mechanism is gone:", "", *(f"- {x}" for x in GONE)] if GONE else []
    lines += ["", "| bug | file | noticed by | seconds | key |", "| --- | --- | --- | --- | --- |"]
    RESULTS.write_text("\n".join([*lines, *(str(row) for _, row in rows), ""]))


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


def build(where: Path) -> bool:
    """Compile the C files of a copy. Returns whether there is a library."""
    libraries = list((where / "package/revdeq/kernels").glob("_cpu*"))
    for library in libraries:
        library.unlink()
    for name in ("revdeq", "revdeq/kernels"):
        (where / Path(name).name).symlink_to(where / "package" / name)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", "package"]
    subprocess.run(command, cwd=where, check=True, capture_output=True)
    return bool(libraries) and all(library.exists() for library in libraries)


def first_failure(arguments: list[str], where: Path, first: Sequence[str] = ()) -> str | None:
    """The file and the name of the first test that fails, or None. `first` are the names of tests to begin with."""
    paths = os.pathsep.join(map(str, (where / "package", where / "tests/tools/mutants")))
    order = {"MUTANTS_FIRST": " ".join(first), "MUTANTS_DURATIONS": str(REPOSITORY / ".venv/durations.json")}
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **order}
    limit = ["-o", "faulthandler_timeout=240", "-o", "faulthandler_exit_on_timeout=true"]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "order", *limit, *arguments]
    try:
        result = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, timeout=1800)
    except subprocess.TimeoutExpired:
        return "timeout"
    if result.returncode == 0:
        return None
    if result.returncode < 0:
        return f"killed by signal {-result.returncode}"
    if "Timeout (" in result.stderr:
        return "timeout"
    if name := re.search(r"^(?:FAILED|ERROR) (\S+?\.py(?:::\w+)?)", result.stdout, re.MULTILINE):
        return name[1]
    if "ImportError while loading conftest" in result.stderr:
        return "import revdeq"
    raise SystemExit(f"{' '.join(arguments)} did not run:\n{result.stdout}{result.stderr}")


def notice(bug: Bug, results: dict[str, Noticed]) -> Noticed:
    """Find the test that notices the bug: in the file that did before, or else in all of them."""
    start, by, before = time.perf_counter(), None, results[bug.name].by if bug.name in results else ""
    similar = Counter(row.by for row in results.values() if row.file == bug.file) + Counter({before: 999})
    file, every = before.partition("::")[0], suites(bug.file)
    again = [[x for x in some if x == file or not x.startswith("tests/")] for some in every if file in some]
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        copy_repository(where)
        (where / "package/revdeq" / bug.file.removeprefix("revdeq/")).write_text(mutated(bug))
        if bug.file.endswith((".c", ".h")) and not build(where):
            raise SystemExit(f"{bug.name} does not compile")
        for arguments in [*again, *every]:
            by = by or first_failure(arguments, where, [name for name, _ in similar.most_common()])
    by = by or UNNOTICED
    return Noticed(bug.name, bug.file, by, time.perf_counter() - start, fingerprint(bug, by))


def check_without_bugs(bugs: list[Bug]) -> None:
    """Check that the tests pass without bugs."""
    with tempfile.TemporaryDirectory() as folder:
        copy_repository(Path(folder))
        for arguments in {tuple(sorted(x)): x for bug in bugs for x in suites(bug.file)}.values():
            if failure := first_failure(arguments, Path(folder)):
                raise SystemExit(f"{failure} fails without any bug")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    bugs = [b for b in ALL if not arguments.names or any(x in f"{b.name} {b.file}" for x in arguments.names)]
    results = earlier()
    current = {bug.name: replace(row, key=fingerprint(bug, row.by)) for bug in ALL if (row := results.get(bug.name))}
    left = [bug for bug in bugs if bug.name not in results or results[bug.name] != current[bug.name]]
    check_without_bugs(left)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for row in pool.map(lambda bug: notice(bug, earlier()), left):
            print(row, flush=True)
            write({**earlier(), row.name: row})
    results = earlier()
    unnoticed = [bug.name for bug in bugs if results[bug.name].by == UNNOTICED and not explained(bug.name)]
    print(f"\n{len(unnoticed)} of {len(bugs)} go unnoticed without an explanation", *unnoticed, sep="\n- ")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
