"""Threads, their registers and their program counters."""

import functools
import re

import numpy as np

from .instructions import DTYPES, execute, is_known
from .memory import Memory
from .parse import EmulationError, Program


class Machine:
    """All threads of all programs are one vector. An instruction is executed by the threads that have reached it."""

    def __init__(self, program: Program, programs: range, arguments: list[int | float], memory: Memory) -> None:
        if unknown := [x.text for x in program.instructions if not is_known(x)]:
            raise EmulationError(f"unsupported instruction: {unknown[0]}")
        self.program, self.memory = program, memory
        everyone = np.arange(len(programs) * program.threads)
        self.special = {
            "%tid.x": everyone % program.threads,
            "%ctaid.x": programs.start + everyone // program.threads,
            "%nctaid.x": np.full(everyone.size, programs.stop),
        }
        # Triton appends two pointers to scratch memory, which the kernels do not use.
        padded = [*arguments, 0, 0]
        if len(padded) != len(program.parameters):
            raise EmulationError(f"{len(arguments)} arguments for {len(program.parameters) - 2} parameters")
        self.parameters = {
            name: _parameter(value, DTYPES[kind])
            for (name, kind), value in zip(program.parameters.items(), padded, strict=True)
        }
        self.values: dict[str, np.ndarray] = {}
        self.unwritten: dict[str, np.ndarray] = {}
        """Which threads have not written to a register that others have written to."""
        self._everyone = everyone

    def run(self) -> None:
        """Threads at the lowest program counter run first, so that diverged threads converge again."""
        at = {0: self._everyone}
        with np.errstate(all="ignore"):
            while at:
                place = min(at)
                threads = at.pop(place)
                if place == len(self.program.instructions):
                    raise EmulationError("threads left the program without ret")
                for target, group in self._step(place, threads):
                    if group.size:
                        at[target] = np.union1d(at[target], group) if target in at else group

    def _step(self, place: int, threads: np.ndarray):
        """Execute one instruction. Returns the next program counters and their threads."""
        instruction = self.program.instructions[place]
        skipping = threads[:0]
        if instruction.guard is not None:
            taken = self.read(instruction.guard.removeprefix("!"), "pred", threads)
            taken = ~taken if instruction.guard.startswith("!") else taken
            threads, skipping = threads[taken], threads[~taken]
        if instruction.name in ("bra", "bra.uni"):
            return (self.program.labels[instruction.operands[0]], threads), (place + 1, skipping)
        if instruction.name == "ret":
            return ((place + 1, skipping),)
        if threads.size:
            try:
                execute(self, instruction, threads)
            except EmulationError as error:
                raise EmulationError(f"{error}: {instruction.text}") from None
        return ((place + 1, np.union1d(threads, skipping) if skipping.size else threads),)

    def read(self, operand: str, kind: str, threads: np.ndarray) -> np.ndarray:
        """The value of an operand, as this type, for these threads."""
        dtype = DTYPES[kind]
        if operand in self.program.registers:
            if operand not in self.values or (operand in self.unwritten and self.unwritten[operand][threads].any()):
                raise EmulationError(f"register {operand} is read before it is written")
            values = self.values[operand]
            if values.itemsize != dtype.itemsize:
                raise EmulationError(f"register {operand} is not of the size of {kind}")
            return (values if self._are_all(threads) else values[threads]).view(dtype)
        if operand in self.special:
            return self.special[operand][threads].astype(dtype)
        return np.full(threads.size, _constant(operand, dtype))

    def write(self, register: str, value: np.ndarray, threads: np.ndarray) -> None:
        if register == "_":  # discarded
            return
        if register not in self.program.registers:
            raise EmulationError(f"{register} is not a register")
        dtype = _bits(DTYPES[self.program.registers[register]])
        if dtype.itemsize != value.itemsize:
            raise EmulationError(f"register {register} is not of the size of what is written to it")
        if self._are_all(threads):  # values are never changed in place, so that registers may share them
            self.values[register] = value.view(dtype)
            self.unwritten.pop(register, None)
            return
        if register not in self.values:
            self.unwritten[register] = np.ones(self._everyone.size, bool)
        before = self.values.get(register)
        self.values[register] = np.zeros(self._everyone.size, dtype) if before is None else before.copy()
        self.values[register][threads] = value.view(dtype)
        if register in self.unwritten:
            self.unwritten[register][threads] = False

    def _are_all(self, threads: np.ndarray) -> bool:
        return threads.size == self._everyone.size


def _parameter(value: int | float, dtype: np.dtype) -> np.ndarray:
    """Integers are passed as bits, because a parameter's type does not say whether it is signed."""
    if dtype.kind == "f":
        return np.array([value], dtype)
    return np.array([value & (1 << 8 * dtype.itemsize) - 1], _bits(dtype)).view(dtype)


def _bits(dtype: np.dtype) -> np.dtype:
    return dtype if dtype.kind == "b" else np.dtype(f"u{dtype.itemsize}")


@functools.cache
def _constant(text: str, dtype: np.dtype) -> np.generic:
    """0f3F800000 and 0d3FF0000000000000 are the bits of a float; everything else is an integer."""
    if match := re.fullmatch(r"0[fd]([0-9A-Fa-f]{8}|[0-9A-Fa-f]{16})|(-?\d+)|0x([0-9A-Fa-f]+)", text):
        number = int(match[1] or match[3], 16) if match[2] is None else int(match[2])
        if match[1] is None or len(match[1]) == 2 * dtype.itemsize:
            return _bits(dtype).type(number & (1 << 8 * dtype.itemsize) - 1).view(dtype)
    raise EmulationError(f"{text} is neither a register nor a constant of {dtype}")


def run(program: Program, programs: range, arguments: list[int | float], memory: Memory) -> None:
    """Run all programs of the grid, or the last ones. arguments: addresses and numbers."""
    Machine(program, programs, arguments, memory).run()
