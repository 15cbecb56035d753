"""The bugs of `make mutants` can be applied to the current files."""

import pytest
from mutants.bugs import BUGS, TRITON, WRAPPER, C


@pytest.mark.parametrize("bugs", [WRAPPER, C, TRITON], ids=["wrapper", "C", "Triton"])
def test_each_bug_replaces_text_that_occurs_once(bugs):
    assert len({bug.text() for bug in bugs}) == len(bugs)


def test_the_names_of_bugs_are_unique():
    assert len({bug.name for bug in BUGS}) == len(BUGS)
