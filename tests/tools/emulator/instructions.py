"""What each instruction does. Instructions and modifiers that are not listed are errors."""

import functools
import re
from collections.abc import Callable

import numpy as np

from .arithmetic import bfloat16_to_float32, float32_to_bfloat16, fma, to_integer
from .parse import EmulationError, Instruction, address, elements

DTYPES = {"pred": np.dtype(bool), "bf16": np.dtype("u2"), "f32x2": np.dtype("u8")}
DTYPES |= {
    f"{kind}{8 * size}": np.dtype(f"{code}{size}")
    for kind, code in {"b": "u", "u": "u", "s": "i", "f": "f"}.items()
    for size in (2, 4, 8)
}


def execute(machine, instruction: Instruction, threads: np.ndarray) -> None:
    action, types = _find(instruction.name)
    action(machine, instruction.operands, threads, *types)


def is_known(instruction: Instruction) -> bool:
    return instruction.name in CONTROL or _find(instruction.name) is not None


@functools.cache
def _find(name: str) -> tuple[Callable, tuple[str, ...]] | None:
    for pattern, action in ACTIONS.items():
        if match := re.fullmatch(pattern, name):
            return action, match.groups()
    return None


def _shift_left(a: np.ndarray, count: np.ndarray) -> np.ndarray:
    """PTX defines shifts by all bits or more, and numpy does not."""
    return np.where(count < 8 * a.itemsize, a << count.astype(a.dtype), 0).astype(a.dtype)


def _shift_right(a: np.ndarray, count: np.ndarray) -> np.ndarray:
    beyond = np.where(a < 0, -1, 0)
    return np.where(count < 8 * a.itemsize, a >> count.astype(a.dtype), beyond).astype(a.dtype)


# The name ends with the type of the operands and the result. Instructions without a rounding mode (add.f64) are not
# supported, because the assembler may contract them.
OPERATIONS: dict[str, Callable[..., np.ndarray]] = {
    r"add\.rn\.(f32|f64|f32x2)": np.add,
    r"sub\.rn\.(f32|f64|f32x2)": np.subtract,
    r"mul\.rn\.(f32|f64|f32x2)": np.multiply,
    r"fma\.rn\.(f32|f64|f32x2)": fma,
    r"div\.rn\.(f32|f64)": np.divide,
    r"neg\.(s32|s64|f64)": np.negative,
    r"abs\.(f32|f64)": np.abs,
    r"add\.(s32|s64)": np.add,
    r"sub\.(s32|s64)": np.subtract,
    r"mul\.lo\.(s32|s64)": np.multiply,
    r"mul\.hi\.(u32)": lambda a, b: (a.astype(np.uint64) * b >> 32).astype(np.uint32),
    r"mad\.lo\.(s32|s64)": lambda a, b, c: a * b + c,
    r"max\.(s32|u32)": np.maximum,
    r"and\.(b16|b32|b64|pred)": np.bitwise_and,
    r"or\.(b16|b32|b64|pred)": np.bitwise_or,
    r"xor\.(b16|b32|b64|pred)": np.bitwise_xor,
    r"not\.(b64|pred)": np.invert,
}

COMPARISONS: dict[str, Callable[..., np.ndarray]] = {
    "eq": np.equal,
    "ne": lambda a, b: (a < b) | (a > b),  # false for NaN, like all comparisons without the suffix u
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}

CONVERSIONS: dict[str, Callable[..., np.ndarray]] = {
    r"cvt\.(f32|f64)\.(bf16)": lambda x, to: bfloat16_to_float32(x).astype(to),
    r"cvt\.rn\.(bf16)\.(f32)": lambda x, to: float32_to_bfloat16(x),
    r"cvt\.rzi\.([us]32|[us]64)\.(f32|f64)": lambda x, to: to_integer(x, to.type),
    r"cvt(?:\.rn)?\.(f16|f32|f64)\.(f16|f32|f64|[us]32|[us]64)": lambda x, to: x.astype(to),
    r"cvt\.([us]16|[us]32|[us]64)\.([us]16|[us]32|[us]64)": lambda x, to: x.astype(to),
}


def _operate(operation: Callable) -> Callable:
    def action(machine, operands, threads, kind):
        to, *sources = operands
        values = (machine.read(x, kind, threads) for x in sources)
        if kind == "f32x2":
            result = operation(*(x.view(np.float32) for x in values)).view(DTYPES[kind])
        else:
            result = operation(*values)
        machine.write(to, result, threads)

    return action


def _shift(operation: Callable) -> Callable:
    def action(machine, operands, threads, kind):
        to, source, count = operands
        machine.write(to, operation(machine.read(source, kind, threads), machine.read(count, "u32", threads)), threads)

    return action


def _compare(comparison: Callable, or_unordered: bool) -> Callable:
    def action(machine, operands, threads, kind):
        to, *sources = operands
        a, b = (machine.read(x, kind, threads) for x in sources)
        machine.write(to, comparison(a, b) | (or_unordered & ((a != a) | (b != b))), threads)

    return action


def _convert(conversion: Callable) -> Callable:
    def action(machine, operands, threads, to_kind, kind):
        to, source = operands
        machine.write(to, conversion(machine.read(source, kind, threads), DTYPES[to_kind]), threads)

    return action


def _convert_pair(machine, operands, threads, kind):
    """Convert two float32 to the halves of 32 bits, the first to the upper half."""
    to, *sources = operands
    narrow = {"f16x2": lambda x: x.astype(np.float16).view(np.uint16), "bf16x2": float32_to_bfloat16}[kind]
    high, low = (narrow(machine.read(x, "f32", threads)).astype(np.uint32) for x in sources)
    machine.write(to, high << 16 | low, threads)


def _extract(machine, operands, threads, kind):
    """`length` bits of a number, from a position."""
    to, source, position, length = operands
    bits = machine.read(source, kind, threads) >> DTYPES[kind].type(int(position))
    machine.write(to, bits & DTYPES[kind].type((1 << int(length)) - 1), threads)


def _select(machine, operands, threads, kind):
    to, a, b, condition = operands
    condition = machine.read(condition, "pred", threads)
    machine.write(to, np.where(condition, machine.read(a, kind, threads), machine.read(b, kind, threads)), threads)


def _multiply_wide(machine, operands, threads, sign):
    """The 64-bit product of two 32-bit numbers, plus an optional third operand."""
    to, a, b, *c = operands
    product = machine.read(a, f"{sign}32", threads).astype(DTYPES[f"{sign}64"]) * machine.read(b, f"{sign}32", threads)
    for x in c:
        product = product + machine.read(x, f"{sign}64", threads)
    machine.write(to, product, threads)


def _move(machine, operands, threads, kind):
    """Move between registers, or between a register and the parts of a vector, lowest bits first."""
    to, source = operands
    parts = elements(source if source.startswith("{") else to)
    size = DTYPES[kind].itemsize // len(parts)
    if source.startswith("{"):
        value = np.stack([_part(machine, x, 8 * size, threads) for x in parts], axis=1)
        machine.write(to, value.view(DTYPES[kind]).ravel(), threads)
    else:
        value = machine.read(source, kind, threads)
        columns = np.ascontiguousarray(value)[:, None] if kind == "pred" else value[:, None].view(f"u{size}")
        for x, column in zip(parts, columns.T, strict=True):
            if x != "_":  # discarded
                machine.write(x, np.ascontiguousarray(column), threads)


def _part(machine, operand: str, bits: int, threads: np.ndarray) -> np.ndarray:
    """A part of a vector. Undefined registers are all ones, NaN as a float, so that it shows if they are used."""
    if operand in machine.program.undefined:
        return np.full(threads.size, (1 << bits) - 1, f"u{bits // 8}")
    return machine.read(operand, f"b{bits}", threads)


def _load_parameter(machine, operands, threads, kind):
    """Signed and unsigned integers are extended to wider registers."""
    to, source = operands
    name, wide = source.strip("[]"), DTYPES[kind[0] + machine.program.registers[to][1:]]
    if name not in machine.parameters or machine.parameters[name].itemsize != DTYPES[kind].itemsize:
        raise EmulationError(f"{source} is not a parameter of the size of {kind}")
    machine.write(to, np.full(threads.size, machine.parameters[name].view(DTYPES[kind]).astype(wide)), threads)


def _load(machine, operands, threads, count, kind):
    to, source = operands
    values = machine.memory.load(_addresses(machine, source, threads), threads, DTYPES[kind].itemsize, int(count or 1))
    for x, value in zip(elements(to), values, strict=True):
        machine.write(x, value, threads)


def _store(machine, operands, threads, count, kind):
    to, source = operands
    values = [machine.read(x, kind, threads) for x in elements(source)]
    if len(values) != int(count or 1):
        raise EmulationError(f"{len(values)} values")
    machine.memory.store(_addresses(machine, to, threads), threads, values)


def _addresses(machine, operand: str, threads: np.ndarray) -> np.ndarray:
    base, offset = address(operand)
    return machine.read(base, "u64", threads) + np.array(offset).astype(np.uint64)


CONTROL = ("bra", "bra.uni", "ret")
"""Control flow, which machine.py implements."""

ACTIONS: dict[str, Callable] = {
    r"ld\.param\.([bsuf]32|[bsuf]64)": _load_parameter,
    r"ld\.global(?:\.v([248]))?\.(b16|b32|b64)": _load,
    r"st\.global(?:\.v([248]))?\.(b16|b32|b64)": _store,
    r"mov\.([bu]16|[bu]32|[bu]64|pred)": _move,
    r"selp\.([bf]16|[bf]32|[bf]64)": _select,
    r"bfe\.(u32)": _extract,
    r"(?:mul|mad)\.wide\.([us])32": _multiply_wide,
    r"cvt\.rn\.(f16x2|bf16x2)\.f32": _convert_pair,
    **{pattern: _operate(operation) for pattern, operation in OPERATIONS.items()},
    r"shl\.(b16|b32|b64)": _shift(_shift_left),
    r"shr\.([us]32|[us]64)": _shift(_shift_right),
    **{rf"setp\.{name}\.([us]\d\d|f32|f64|b\d\d)": _compare(c, False) for name, c in COMPARISONS.items()},
    **{rf"setp\.{name}u\.(f32|f64)": _compare(c, True) for name, c in COMPARISONS.items()},
    **{pattern: _convert(conversion) for pattern, conversion in CONVERSIONS.items()},
}
