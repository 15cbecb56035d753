"""The bugs: in which file, and what text becomes what. Each text occurs once in its file."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Bug:
    name: str
    file: str
    edits: tuple[tuple[str, str], ...]


def bug(name: str, file: str, old: str, new: str, *more: tuple[str, str]) -> Bug:
    return Bug(name, f"kernels/{file}", ((old, new), *more))


BUGS = (
    # what an interpreter notices as well
    bug("sign", "gpu.py", "b_next = A * b_state + BETA * b_f", "b_next = A * b_state - BETA * b_f"),
    bug("constant", "gpu.py", "& 0x7FFFFFFF", "& 0x7FFFFFFE"),
    bug(
        "offset between chunks",
        "gpu.py",
        "    start = tl.program_id(0).to(tl.int64) * (ROWS * LANES)\n",
        "    start = tl.program_id(0).to(tl.int64) * (ROWS * LANES - 2)\n",
    ),
    bug("state not stored", "gpu.py", "        tl.store(p_state + o_row, b_next, mask=m_row)\n", ""),
    bug("copy not stored", "gpu.py", "        _store_copy(p_copy + o_row, b_previous, m_row)\n", ""),
    bug("sums in one place", "gpu.py", "p_first = p_partial + chunk * LANES", "p_first = p_partial"),
    bug("weights swapped", "gpu.py", "A * b_adjoint + BETA * b_vjp", "BETA * b_adjoint + A * b_vjp"),
    bug(
        "vjp not converted",
        "gpu.py",
        "b_vjp = tl.load(p_vjp + o_row, mask=m_row).to(p_adjoint.dtype.element_ty)",
        "b_vjp = tl.load(p_vjp + o_row, mask=m_row)",
    ),
    bug("f in float32", "gpu.py", "BETA * b_f.to(tl.float64)", "BETA * b_f.to(tl.float32)"),
    bug("times the inverse", "gpu.py", "1 / a if math.frexp(a)[0] in (0.5, -0.5) else None", "1 / a"),
    bug("truncated", "gpu_exact.py", "(b_size + 8388608.0) - 8388608.0", "b_size"),
    bug("sign of f", "gpu_exact.py", "tl.where(b_scaled < 0.0, -b_number, b_number), b_fits", "b_number, b_fits"),
    bug("range of f", "gpu_exact.py", "b_fits = b_whole < 2147483648.0", "b_fits = b_whole <= 2147483648.0"),
    bug("jump in 32 bits", "gpu_exact.py", "(b_next - b_y).to(tl.float32)",
        "(b_next - b_y).to(tl.int32).to(tl.float32)"),
    bug("range of the state", "gpu_exact.py", "(b_next >= -2147483648) & (b_next < 2147483648)",
        "(b_next >= -4294967296) & (b_next < 4294967296)"),
    bug("remainder kept when put aside", "gpu_exact.py", "            b_r = b_r * 0\n", ""),
    bug("remainder without its top bit", "gpu_exact.py", "& 0xFFFFFFFF", "& 0x7FFFFFFF"),
    bug("no division by p", "gpu_exact.py", "    if P == 1:\n", "    if P <= 2:\n"),
    bug("alarm of another half-step", "gpu_exact.py", "p_alarm += half_step * LANES", "p_alarm += half_step"),
    bug("floor off by one", "gpu_exact.py", "- 8589934592\n", "- 8589934591\n"),
    bug("initial state loaded without its mask", "gpu_exact.py", "_load(p_initial + o_row, m_row)",
        "_load(p_initial + o_row, None)"),
    # what it does not
    bug("contraction, in both states", "gpu.py", "enable_fp_fusion=False", "enable_fp_fusion=True"),
    bug(
        "beta in float32",
        "gpu.py",
        "    A: tl.constexpr, BETA: tl.constexpr, NORMS: tl.constexpr",
        "    A, BETA, NORMS: tl.constexpr",
        ("p_copy, left, A: tl.constexpr, BETA: tl.constexpr, ROWS", "p_copy, left, A, BETA, ROWS"),
    ),
    bug(
        "adjoint's beta in float32",
        "gpu.py",
        "p_adjoint, p_vjp, n,\n    A: tl.constexpr, INVERSE_A: tl.constexpr, BETA: tl.constexpr,",
        "p_adjoint, p_vjp, n,\n    A: tl.constexpr, INVERSE_A: tl.constexpr, BETA,",
        ("p_copy, p_adjoint, p_vjp, left,\n    A: tl.constexpr, INVERSE_A: tl.constexpr, BETA: tl.constexpr,",
         "p_copy, p_adjoint, p_vjp, left,\n    A: tl.constexpr, INVERSE_A: tl.constexpr, BETA,"),
        ("b_f, A: tl.constexpr, INVERSE_A: tl.constexpr, BETA: tl.constexpr):",
         "b_f, A: tl.constexpr, INVERSE_A: tl.constexpr, BETA):"),
        ("p_vjp, o_row, m_row, A: tl.constexpr, BETA: tl.constexpr):", "p_vjp, o_row, m_row, A: tl.constexpr, BETA):"),
    ),
    bug("32-bit offset", "gpu.py", "    start = tl.program_id(0).to(tl.int64) * (ROWS * LANES)\n",
        "    start = tl.program_id(0) * (ROWS * LANES)\n"),
    bug("32-bit offset of the exact state", "gpu_exact.py",
        "    start = tl.program_id(0).to(tl.int64) * (ROWS * LANES)\n",
        "    start = tl.program_id(0) * (ROWS * LANES)\n"),
    bug("f loaded without its mask", "gpu.py", "tl.load(p_f + o_row, mask=m_row).to(tl.float64)",
        "tl.load(p_f + o_row).to(tl.float64)"),
    bug("vjp loaded without its mask", "gpu.py", "tl.load(p_vjp + o_row, mask=m_row)", "tl.load(p_vjp + o_row)"),
    bug("range of f before it is rounded", "gpu_exact.py", "b_fits = b_whole <", "b_fits = b_size <"),
    bug(
        "stored twice, first by a neighbour",
        "gpu.py",
        "        _store_copy(p_copy + o_row, b_next, m_row)\n",
        "        if m_row is None:\n            _store_copy(p_copy + (o_row ^ 2), b_next, None)\n"
        "        _store_copy(p_copy + o_row, b_next, m_row)\n",
    ),
    bug(
        "stored twice, first by the program before",
        "gpu.py",
        "    if start + ROWS * LANES <= n:\n        b_change",
        "    if start + 2 * ROWS * LANES <= n:\n        o_lane = tl.arange(0, LANES)\n"
        "        _store_copy(p_copy + ROWS * LANES + o_lane, o_lane.to(tl.float64), None)\n"
        "    if start + ROWS * LANES <= n:\n        b_change",
    ),
    bug("half as many threads", "gpu.py", "THREADS = reference.LANES // 2", "THREADS = reference.LANES // 4"),
    bug("twice as many threads", "gpu.py", "THREADS = reference.LANES // 2", "THREADS = reference.LANES"),
    bug("barrier", "gpu.py", "        b_next = A * b_state",
        "        tl.debug_barrier()\n        b_next = A * b_state"),
    bug("always divided", "gpu.py", "1 / a if math.frexp(a)[0] in (0.5, -0.5) else None", "None"),
    bug("full chunks masked", "gpu.py", "_relax_rows(p_state, p_f, p_copy, None, A",
        "_relax_rows(p_state, p_f, p_copy, n - start, A"),
    bug("float64 for the exact state", "gpu_exact.py", "(b_next - b_y).to(tl.float32) * UNIT",
        "((b_next - b_y).to(tl.float64) * UNIT).to(tl.float32)"),
)  # fmt: skip
