"""Bugs in the wrapper drawn by a fixed seed: a deleted statement, a flipped comparison, a number that is off by one.

Places are ranked by a hash of their text and the seed, so that a change of one place draws few others anew.
"""

import ast
import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from bugs import REPOSITORY, Bug

SEED, COUNT = 41, 40

OPPOSITES = [(ast.Lt, ast.GtE), (ast.Gt, ast.LtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)]
FLIPPED = dict([*OPPOSITES, *((b, a) for a, b in OPPOSITES)])
DELETED = (ast.Expr, ast.Assign, ast.AugAssign, ast.Delete, ast.Raise, ast.Return)
NUMBERED = (ast.Subscript, ast.Slice, ast.BinOp)


def _replacements(node: ast.AST) -> Iterator[str]:
    """The texts by which a part of a function is replaced."""
    if isinstance(node, DELETED) and not isinstance(getattr(node, "value", None), (ast.Constant, ast.Yield)):
        yield "pass"
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield ast.unparse(ast.Compare(node.left, [FLIPPED[type(node.ops[0])]()], node.comparators))
    for number in ast.iter_child_nodes(node) if isinstance(node, NUMBERED) else ():
        if isinstance(number, ast.Constant) and type(number.value) is int:
            before = number.value
            number.value += -1 if before > 0 else 1
            yield ast.unparse(node)
            number.value = before


def _bugs(path: Path) -> Iterator[Bug]:
    """All bugs of a file."""
    text, file, seen = path.read_text(), path.relative_to(REPOSITORY).as_posix(), Counter[str]()
    encoded = text.encode()  # ast counts bytes
    lines = encoded.splitlines(keepends=True)
    functions = [x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.FunctionDef)]
    nodes = dict.fromkeys(x for function in functions for statement in function.body for x in ast.walk(statement))
    for node in nodes:
        for new in _replacements(node):
            start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
            end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
            old = " ".join(encoded[start:end].decode().split())
            what = f"`{old[:80]}` " + ("deleted" if new == "pass" else f"became `{' '.join(new.split())[:80]}`")
            seen[what] += 1
            name = f"drawn: {path.name} {what}" + (f", place {seen[what]}" if seen[what] > 1 else "")
            mutant = (encoded[:start] + new.encode() + encoded[end:]).decode()
            yield Bug(name, file, ((text, mutant),))


def _rank(bug: Bug) -> str:
    return hashlib.sha256(f"{SEED} {bug.name}".encode()).hexdigest()


_ALL = (bug for path in (REPOSITORY / "revdeq/_solver").glob("*.py") for bug in _bugs(path))
DRAWN = tuple(sorted(_ALL, key=_rank)[:COUNT])
