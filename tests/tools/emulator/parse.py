"""Parses PTX."""

import functools
import re
from dataclasses import dataclass


class EmulationError(Exception):
    """A bug that a GPU would not report, or something that the emulator does not support."""


@dataclass(frozen=True)
class Instruction:
    """`@!%p1 add.rn.f64 %rd1, %rd2, 0d3FF0000000000000;`: the guard, the name with its modifiers, the operands."""

    text: str
    guard: str | None
    name: str
    operands: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """parameters and registers: their types, by name. threads: the number per program. labels: the index of the
    instruction that follows each."""

    parameters: dict[str, str]
    threads: int
    registers: dict[str, str]
    instructions: list[Instruction]
    labels: dict[str, int]

    @functools.cached_property
    def undefined(self) -> set[str]:
        """Registers that are never written. The compiler uses them for unused halves of a pair."""
        results = {x for i in self.instructions if i.operands for x in elements(i.operands[0])}
        return self.registers.keys() - results


def parse(ptx: str) -> Program:
    ptx = re.sub(r"//[^\n]*", "", ptx)
    if not (entry := re.search(r"\.entry\s+\w+\s*\(([^)]*)\)\s*\.reqntid\s+(\d+)\s*\{\n(.*?)\n\}", ptx, re.DOTALL)):
        raise EmulationError("no kernel: expected .entry name(...) .reqntid threads { ... }")
    parameters = {words[-1]: words[1].removeprefix(".") for words in map(str.split, entry[1].split(",")) if words}
    registers: dict[str, str] = {}
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in map(str.strip, entry[3].splitlines()):
        if not line or re.match(r"\.(loc|pragma)\b", line):
            continue
        if label := re.fullmatch(r"(\$?\w+):", line):
            labels[label[1]] = len(instructions)
        elif register := re.fullmatch(r"\.reg\s+\.(\w+)\s+(%\w+)<(\d+)>;", line):
            registers |= {f"{register[2]}{i}": register[1] for i in range(int(register[3]))}
        elif register := re.fullmatch(r"\.reg\s+\.(\w+)\s+(%\w+);", line):
            registers[register[2]] = register[1]
        elif instruction := re.fullmatch(r"(?:@(!?%\w+)\s+)?([a-z][\w.:]*)\s*([^;]*);", line):
            guard, name, operands = instruction.groups()
            instructions.append(Instruction(line, guard, name, tuple(_split(operands))))
        else:
            raise EmulationError(f"not an instruction: {line}")
    return Program(parameters, int(entry[2]), registers, instructions, labels)


def _split(operands: str) -> list[str]:
    """Split at commas that are not within braces."""
    return [x.strip() for x in re.findall(r"\{[^}]*\}|[^,{}]+", operands) if x.strip()]


def elements(operand: str) -> list[str]:
    """The registers of `{ %r1, %r2 }` or `%r1`."""
    return [x.strip() for x in operand.strip("{} ").split(",")]


def address(operand: str) -> tuple[str, int]:
    """The base and offset of `[ %rd1 + 8 ]`, `[%rd1+-8]` or `[parameter]`."""
    if not (parts := re.fullmatch(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\d+))?\s*\]", operand)):
        raise EmulationError(f"not an address: {operand}")
    return parts[1], int(parts[2] or 0)
