"""The bugs of `make mutants` can be applied to the current files."""

from pathlib import Path

import pytest
from mutants.bugs import BUGS

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_each_bug_replaces_text_that_occurs_once(bug):
    text = (REPOSITORY / bug.file).read_text()
    for old, new in bug.edits:
        assert text.count(old) == 1 and new != old
        text = text.replace(old, new)
    assert not bug.file.endswith(".py") or compile(text, bug.file, "exec")


def test_the_names_of_bugs_are_unique():
    assert len({bug.name for bug in BUGS}) == len(BUGS)
