"""The bugs of `make mutants` are bugs of today's kernels."""

from pathlib import Path

import pytest
from mutants.bugs import BUGS

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_changes_text_that_is_there_once(bug):
    text = (REPOSITORY / bug.file).read_text()
    for old, new in bug.edits:
        assert text.count(old) == 1 and new != old
        text = text.replace(old, new)


def test_bugs_have_names_of_their_own():
    assert len({bug.name for bug in BUGS}) == len(BUGS)
