"""Executes the PTX that Triton compiles for an NVIDIA GPU on the CPU, with the same bits.

`emulating` makes launches on CPU tensors do what they would do on a GPU, so that a test can compare the bits. Bugs
that a GPU would not report are errors here: an access that is out of bounds or misaligned, a race between two threads,
a register that is read before it is written.

The kernels need neither shared memory nor barriers, and the emulator has neither. It supports the instructions that
the kernels use, and any other is an error. There is one exception: it supports fused multiply-adds, so that a
contraction shows as different bits.
"""

from .launch import emulating
from .machine import run
from .memory import Memory
from .parse import EmulationError, parse

__all__ = ["EmulationError", "Memory", "emulating", "parse", "run"]
