"""What a compiled kernel does for a full block, read from its machine code: SASS for NVIDIA, amdgcn for AMD.

It is the shortest path that skips no access. It takes a loop over rows once, which may be several rows if the compiler
unrolled it.
"""

import functools
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Instruction:
    opcode: str
    operands: str
    guarded: bool = False
    """Executed under a predicate, as NVIDIA's masked accesses are."""

    @property
    def access(self):
        """("load" or "store", bytes) of an access to global memory, or None."""
        if m := re.match(r"(LDG|STG)(\..*)?$", self.opcode):
            bits = re.search(r"\.(256|128|64|U16|S16|U8|S8)\b", m[2] or "")
            width = int(bits[1].lstrip("US")) // 8 if bits else 4
            return {"LDG": "load", "STG": "store"}[m[1]], width
        if m := re.match(r"(?:global|buffer|flat)_(load|store)_(?:dword(?:x(\d))?|b(\d+)|\w*?(\d+))", self.opcode):
            width = 4 * int(m[2]) if m[2] else int(m[3] or m[4] or 32) // 8
            return m[1], width
        if re.match(r"ATOM|RED|(global|buffer|flat)_atomic", self.opcode):
            raise ValueError(f"{self.opcode}: no kernel here should use an atomic")
        return None

    @property
    def float64(self):
        """Whether it is float64 arithmetic or a conversion."""
        return bool(re.match(r"D(ADD|MUL|FMA|SETP|MNMX)|[A-Z0-9]+\.(.*\.)?F64|MUFU\.\w+64|v_\w*f64", self.opcode))

    @property
    def fused(self):
        """The number of floating-point multiply-adds: AMD has instructions with two."""
        halves = f"{self.opcode} {self.operands}".split(" :: ")
        return sum(bool(re.match(r"DFMA|FFMA|v_(pk_|dual_)?(fma|mad|mac)\w*_f\d\d", half.strip())) for half in halves)


@functools.cache
def text_of(kernel):
    """The machine code and resource usage of a kernel, as text. The disassembler takes half a second."""
    if "amdgcn" in kernel.asm:
        return kernel.asm["amdgcn"]
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        command = [program, "-res-usage", "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def disassembled(text):
    """A dictionary {address or label: index}, and the instructions."""
    return _amdgcn(text) if "amdgcn" in text else _sass(text)


def _sass(text):
    places, code = {}, []
    for m in re.finditer(r"^\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);", text, re.M):
        places[int(m[1], 16)] = len(code)
        code.append(Instruction(m[3], m[4], bool(m[2])))
    return places, code


def _amdgcn(text):
    places, code = {}, []
    for line in text[: text.index(".Lfunc_end0:")].splitlines():
        if m := re.match(r"(\.?\w+):", line):
            places[m[1]] = len(code)
        elif m := re.match(r"\t([a-z]\w+)\s*(.*?)\s*(;.*)?$", line):
            code.append(Instruction(m[1], m[2]))
    return places, code


END = -1


def successors(index, places, code):
    """The indices of the instructions that may follow, for threads that are not masked. A call of code that ends with
    EXIT is a jump."""
    it, following = code[index], index + 1
    if it.opcode.startswith("EXIT"):
        return [following] if it.guarded else [END]
    if it.opcode == "s_endpgm" or it.opcode.startswith("RET"):
        return [END]
    if it.opcode.startswith("BRA"):
        *conditions, target = it.operands.split(", ")
        there = places[int(target.strip(" `()"), 16)]
        return [there, following] if it.guarded or conditions else [there]
    if it.opcode.startswith("CALL.REL"):
        there = places[int(it.operands.strip(" `()"), 16)]
        end = next(other for other in code[there:] if other.opcode.startswith(("EXIT", "RET")) and not other.guarded)
        if end.opcode.startswith("EXIT"):
            return [there, following] if it.guarded else [there]
    if it.opcode in ("s_branch", "s_cbranch_execnz"):
        return [places[it.operands]]
    if it.opcode.startswith("s_cbranch") and it.opcode != "s_cbranch_execz":
        return [places[it.operands], following]
    if it.opcode.startswith(("BRX", "JMX", "s_setpc")):
        raise ValueError(f"{it.opcode}: the target of an indirect jump is unknown")
    return [following]


def full_block(places, code):
    """The indices of the instructions that a thread executes for a full block."""
    ways, seen = [[0]], {0}
    for way in ways:  # the shortest first
        for following in successors(way[-1], places, code):
            if following == END:
                return way
            if following not in seen:
                seen.add(following)
                ways.append([*way, following])
    raise AssertionError("no path through the kernel ends")


@dataclass(frozen=True)
class Statistics:
    """registers: per thread (AMD: vector registers). spilled: spilled registers or bytes. shared: bytes of shared
    memory. barriers: barriers and accesses to shared memory.
    accesses: {("load" or "store", bytes): count} of a thread in a full block. float64, fused: its float64 instructions
    and multiply-adds."""

    registers: int
    spilled: int
    shared: int
    barriers: int
    accesses: Counter
    float64: int
    fused: int


def statistics(kernel):
    text = text_of(kernel)
    places, code = disassembled(text)
    path = [code[i] for i in full_block(places, code)]
    registers, spilled = resources(text)
    return Statistics(
        registers,
        spilled,
        kernel.metadata.shared,
        sum(bool(re.match(r"BAR|LDS|STS|s_barrier|ds_", it.opcode)) for it in code),
        Counter(it.access for it in path if it.access),
        sum(it.float64 for it in path),
        sum(it.fused for it in path),
    )


def resources(text):
    """The registers per thread, and the spilled registers or bytes."""
    _, code = disassembled(text)
    spills = sum(it.opcode.startswith(("LDL", "STL", "scratch_")) for it in code)
    if "amdgcn" in text:
        names = ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
        registers, *spilled = (int(re.search(rf"\.{name}: +(\d+)", text)[1]) for name in names)
    else:
        registers, *spilled = (int(re.search(rf"\b{name}:(\d+)", text)[1]) for name in ("REG", "STACK", "LOCAL"))
    return registers, sum(spilled) + spills
