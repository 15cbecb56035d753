"""Runs what Triton compiles for an NVIDIA GPU, its PTX, on the CPU and bit for bit.

`emulating` makes launches on CPU tensors do what they would do on a GPU, so that a test can compare the bits. What
would go unnoticed there is an error here: an access out of bounds or misaligned, two threads that meet at an
address, a register read before it is written.

The kernels need no shared memory and no barrier. Neither has the machine: it knows the instructions that the
kernels consist of, and any other is an error. One is known though no kernel has it: a contracted multiply-add
shall show as different bits.
"""

from .launch import emulating
from .machine import run
from .memory import Memory
from .parse import EmulationError, parse

__all__ = ["EmulationError", "Memory", "emulating", "parse", "run"]
