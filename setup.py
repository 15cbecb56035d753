"""Packages `kernels/` as `revdeq.kernels`, and compiles its C kernels if there is a compiler.

torch is not imported: an isolated build does not have it, and the C kernels do not need it.
"""

import re
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, CompileError

ROOT = Path(__file__).parent
SOURCES = ["kernels/cpu/float64.c", "kernels/cpu/exact.c"]
PACKAGES = ("_solver", "cli", "examples", "models", "training", "training.data", "kernels", "kernels.cpu", "kernels.gpu")


def remove_libraries(folder):
    """Remove libraries of earlier builds, which would otherwise be loaded if this build fails."""
    for library in (*folder.glob("_cpu.*so"), *folder.glob("_cpu.*pyd")):
        library.unlink()


class BuildKernel(build_ext):
    """The C kernels are a plain shared library, loaded by ctypes, not a Python module."""

    def build_extension(self, ext):
        remove_libraries(Path(self.get_ext_fullpath(ext.name)).parent)
        if self.compiler.compiler_type == "msvc":
            ext.extra_compile_args = ["/std:c11", "/O2", "/fp:precise"]  # _Pragma needs C11
            super().build_extension(ext)
            return
        # Fused multiply-adds would change the bits.
        flags = [
            "-std=c11",
            "-O2",
            "-g0",
            "-ftree-vectorize",
            "-ffp-contract=off",
            "-fno-math-errno",
            "-fno-trapping-math",
            "-fvisibility=hidden",
        ]
        # Only on Linux does torch's wheel have its OpenMP runtime under the name that the compiler links.
        attempts = [["-fopenmp"], ["-fopenmp-simd"], []] if sys.platform == "linux" else [["-fopenmp-simd"], []]
        for openmp in attempts:
            ext.extra_compile_args, ext.extra_link_args = flags + openmp, openmp
            try:
                super().build_extension(ext)
                return
            except (CCompilerError, CompileError):
                if openmp == attempts[-1]:
                    raise

    def copy_extensions_to_source(self):
        remove_libraries(ROOT / "kernels")
        super().copy_extensions_to_source()

    def get_export_symbols(self, ext):
        return ext.export_symbols


setup(
    name="revdeq",
    version=re.search(r'__version__ = "(.+)"', (ROOT / "revdeq/__init__.py").read_text()).group(1),
    description="Reversible deep equilibrium models: exact gradients in constant memory",
    # Relative links work in the repository only.
    long_description=re.sub(
        r"<picture>.*?</picture>\n*", "", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.S
    ),
    long_description_content_type="text/markdown",
    author="The revdeq maintainers",
    url="https://arxiv.org/abs/2509.12917",
    project_urls={"Paper": "https://arxiv.org/abs/2509.12917"},
    license="MIT",
    license_files=["LICENSE"],
    keywords=["deep equilibrium models", "reversible", "implicit layers", "pytorch", "triton"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    install_requires=["torch>=2.10", 'triton>=3.6; platform_system == "Linux" and platform_machine == "x86_64"'],
    extras_require={
        "demo": ["matplotlib", "scikit-learn", "tqdm"],
        "test": ["hypothesis", "numpy", "pytest", "pytest-benchmark", "pytest-xdist"],
        "torchdeq": ["torchdeq"],
        "train": ["matplotlib", "numpy", "pillow", "tiktoken", "tqdm"],
        "hub": ["huggingface_hub", "safetensors"],
        "tensorboard": ["tensorboard"],
        "lint": ["check-jsonschema", "mypy", "ruff", "zizmor"],
    },
    packages=["revdeq", *(f"revdeq.{name}" for name in PACKAGES)],
    package_dir={"revdeq": "revdeq", "revdeq.kernels": "kernels"},
    package_data={"revdeq": ["py.typed"], "revdeq.examples": ["*.ipynb"], "revdeq.kernels.cpu": ["*.c", "*.h"]},
    # The library does not use Python's API, so one wheel serves all versions of Python.
    ext_modules=[
        Extension("revdeq.kernels._cpu", SOURCES, depends=["kernels/cpu/common.h"], optional=True, py_limited_api=True)
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
    cmdclass={"build_ext": BuildKernel},
    zip_safe=False,
)
