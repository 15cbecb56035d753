"""Puts one bug after the other into a copy of the repository and runs the tests there.

    python tests/tools/mutants [name ...]      all bugs, or those whose name contains one of these words

Prints which tests notice each, and fails if one goes unnoticed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from bugs import BUGS, Bug

REPOSITORY = Path(__file__).parents[3]

INTERPRETED = {
    "kernels/gpu.py": ["tests/kernels/test_kernels.py", "-k", "triton and (every_pair or every_beta)"],
    "kernels/gpu_exact.py": ["tests/solver/test_exact.py", "-k", "triton and (every or alarm)"],
}


SUITES = ("interpreter", "emulator", "budgets", "launches")


def suites(file: str) -> dict[str, list[str]]:
    """What may notice a bug in this file: the tests of bits, not of layouts, and budgets on one GPU; or those of
    launches."""
    if file == "kernels/launch.py":
        return {"launches": ["tests/kernels/test_launch.py"]}
    return {
        "interpreter": INTERPRETED[file],
        "emulator": ["tests/kernels/test_emulated_kernels.py"],
        "budgets": ["tests/kernels/test_gpu_code.py", "-k", "sm_90 or not (sm_ or gfx)"],
    }


def copy_repository(to: Path) -> None:
    """With the package laid out as it is installed, so that it is found before the one that is."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "revdeq", to / "package/revdeq", ignore=ignore)
    shutil.copytree(REPOSITORY / "kernels", to / "package/revdeq/kernels", ignore=ignore)
    shutil.copytree(REPOSITORY / "tests", to / "tests", ignore=ignore)
    shutil.copy(REPOSITORY / "pyproject.toml", to)


def apply(bug: Bug, to: Path) -> None:
    path = to / "package/revdeq" / bug.file
    text = path.read_text()
    for old, new in bug.edits:
        if text.count(old) != 1:
            raise SystemExit(f"{bug.name}: expected once in {bug.file}, but found {text.count(old)} times:\n{old}")
        text = text.replace(old, new)
    path.write_text(text)


def first_failure(arguments: list[str], where: Path) -> str | None:
    """The name of the first test that fails, or None."""
    environment = {**os.environ, "PYTHONPATH": str(where / "package")}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *arguments]
    result = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True)
    if result.returncode == 0:
        return None
    if result.returncode < 0:
        return f"died of signal {-result.returncode}"
    if result.returncode == 1 and (name := re.search(r"^(?:FAILED|ERROR) \S+::(\w+)", result.stdout, re.MULTILINE)):
        return name[1]
    raise SystemExit(f"{' '.join(command)} did not run:\n{result.stdout}{result.stderr}")


def notice(bug: Bug) -> dict[str, str | None]:
    """By suite, which test notices the bug."""
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        copy_repository(where)
        apply(bug, where)
        return {suite: first_failure(arguments, where) for suite, arguments in suites(bug.file).items()}


def check_without_bugs(bugs: list[Bug]) -> None:
    """Every bug can be applied, and the tests pass without any."""
    for bug in bugs:
        with tempfile.TemporaryDirectory() as folder:
            copy_repository(Path(folder))
            apply(bug, Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        copy_repository(Path(folder))
        for arguments in {tuple(x) for bug in bugs for x in suites(bug.file).values()}:
            if failure := first_failure([*arguments], Path(folder)):
                raise SystemExit(f"{failure} fails without any bug")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    names = parser.parse_args().names
    bugs = [bug for bug in BUGS if not names or any(name in bug.name for name in names)]
    if not bugs:
        parser.error(f"no bug is called like {names}: {', '.join(bug.name for bug in BUGS)}")
    check_without_bugs(bugs)
    print(f"{'bug':<42} {'file':<22} " + "".join(f"{suite:<13}" for suite in SUITES), flush=True)
    unnoticed = []
    for bug in bugs:
        noticed = notice(bug)
        verdicts = "".join(f" {'caught' if noticed.get(suite) else '-':<12}" for suite in SUITES)
        print(f"{bug.name:<42} {bug.file:<22}{verdicts}", flush=True)
        for suite, test in noticed.items():
            if test:
                print(f"    {suite}: {test}", flush=True)
        if not any(noticed.values()):
            unnoticed.append(bug.name)
    if unnoticed:
        print(f"\n{len(unnoticed)} of {len(bugs)} go unnoticed: {', '.join(unnoticed)}")
        return 1
    print(f"\nAll {len(bugs)} are noticed.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
