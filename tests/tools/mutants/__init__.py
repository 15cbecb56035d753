"""Bugs put into the kernels on purpose, to see which tests catch them: `make mutants`."""
