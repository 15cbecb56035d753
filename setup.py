"""Installs the folder `kernels/` as `revdeq.kernels`, and compiles its C files if there is a compiler.

torch is not imported: an isolated build does not have it, and the C files do not need it.
"""

import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, CompileError

FLAGS = [
    "-std=c11",
    "-O2",
    "-g0",
    "-ftree-vectorize",
    "-ffp-contract=off",  # fused multiply-adds would change the bits
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
]


class BuildKernels(build_ext):
    """The C files become a plain shared library, loaded by ctypes, not a Python module."""

    def build_extension(self, ext):
        if self.compiler.compiler_type == "msvc":
            attempts = [["/std:c11", "/O2", "/fp:precise"]]  # _Pragma needs C11
        else:  # only on Linux does torch's wheel have its OpenMP runtime under the name that the compiler links
            openmp = ["-fopenmp", "-fopenmp-simd"] if sys.platform == "linux" else ["-fopenmp-simd"]
            attempts = [*([*FLAGS, flag] for flag in openmp), FLAGS]
        for flags in attempts:
            ext.extra_compile_args = flags
            ext.extra_link_args = [flag for flag in flags if "openmp" in flag]
            try:
                super().build_extension(ext)
                return
            except (CCompilerError, CompileError):
                if flags == attempts[-1]:
                    raise

    def get_export_symbols(self, ext):
        return ext.export_symbols  # without Python's PyInit


def files(pattern):
    return sorted(path.as_posix() for path in Path("kernels").rglob(pattern))


setup(
    packages=[
        *find_packages(include=["revdeq", "revdeq.*"]),
        "revdeq.kernels",
        *(f"revdeq.kernels.{name}" for name in find_packages("kernels")),
    ],
    package_dir={"revdeq.kernels": "kernels"},
    ext_modules=[
        Extension("revdeq.kernels._cpu", files("*.c"), depends=files("*.h"), optional=True, py_limited_api=True)
    ],
    cmdclass={"build_ext": BuildKernels},
    # The library does not use Python's API, so one wheel serves all versions of Python.
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
