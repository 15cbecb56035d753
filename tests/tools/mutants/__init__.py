"""Bugs put into the kernels on purpose, to see which tests notice: `make mutants`."""
