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
    bug("sign", "gpu.py", "* b_state + _moved_by", "* b_state - _moved_by"),
    bug("what f read weighs as much as f", "gpu.py", "b_moved += _number(c", "b_moved += _number(b"),
    bug("sign of the other adjoint", "gpu.py", "b_next += _number(c", "b_next -= _number(c"),
    bug("constant", "gpu.py", "& 0x7FFFFFFF", "& 0x7FFFFFFE"),
    bug("no floor", "gpu.py", "tl.maximum(_magnitude_bits(b_value), floor.to(tl.int32, bitcast=True))",
        "_magnitude_bits(b_value)"),
    bug("offset between blocks", "gpu.py",
        "    first = tl.program_id(0).to(tl.int64) * BLOCK\n    o_x = first + _offsets(BLOCK)\n"
        "    if first + BLOCK <= n:\n        _invert(",
        "    first = tl.program_id(0).to(tl.int64) * (BLOCK - 2)\n    o_x = first + _offsets(BLOCK)\n"
        "    if first + BLOCK <= n:\n        _invert("),
    bug("state not stored", "gpu.py", "a, b, c)\n    tl.store(p_state + o_x, b_next, mask=m_x)\n", "a, b, c)\n"),
    bug("copy not stored", "gpu.py", "    _store_rounded(p_copy + o_x, b_previous, m_x)\n", ""),
    bug("sums in one place", "gpu.py", "p_first = p_partial + chunk * LANES +", "p_first = p_partial +"),
    bug("a row of a group left out", "gpu.py", "c, RELAXED - 1, LANES", "c, RELAXED - 2, LANES"),
    bug("a row of a group added twice", "gpu.py", "p_copy, o_x + LANES, n, b_change", "p_copy, o_x, n, b_change"),
    bug("rows of a group added in another order", "gpu.py",
        "    b_change += (b_next - b_state) * (b_next - b_state)\n    b_value += b_next * b_next\n", "",
        ("    tl.store(p_state + o_x, b_next, mask=m_x)\n    _store_rounded(p_copy + o_x, b_next, m_x)\n    return b",
         "    b_change += (b_next - b_state) * (b_next - b_state)\n    b_value += b_next * b_next\n"
         "    tl.store(p_state + o_x, b_next, mask=m_x)\n    _store_rounded(p_copy + o_x, b_next, m_x)\n    return b")),
    bug("weights swapped", "gpu.py",
        "_number(a, b_adjoint.dtype) * b_adjoint + _number(b, b_adjoint.dtype)",
        "_number(b, b_adjoint.dtype) * b_adjoint + _number(a, b_adjoint.dtype)"),
    bug("seed not stored", "gpu.py", "        _store_rounded(p_seed + o_x, b_next, m_x)\n", "        pass\n"),
    bug("f in float32", "gpu.py", "_load(p_f + o_x, m_x).to(tl.float64)", "_load(p_f + o_x, m_x).to(tl.float32)"),
    bug("coefficients in float32", "gpu.py", "tuple(bits_of(x, self._dtype) for x in",
        "tuple(bits_of(struct.unpack('<f', struct.pack('<f', x))[0], self._dtype) for x in"),
    bug("truncated", "gpu_exact.py", "(b_size + 8388608.0) - 8388608.0", "b_size"),
    bug("sign of f", "gpu_exact.py", "tl.where(b_scaled < 0.0, -b_number, b_number).to(tl.int64), b_fits",
        "b_number.to(tl.int64), b_fits"),
    bug("range of f", "gpu_exact.py", "b_fits = b_whole < 2147483648.0", "b_fits = b_whole <= 2147483648.0"),
    bug("jump in 32 bits", "gpu_exact.py", "(b_next - (b_state >> 32)).to(tl.float32)",
        "(b_next - (b_state >> 32)).to(tl.int32).to(tl.float32)"),
    bug("range of the state", "gpu_exact.py", "(b_next >= -2147483648) & (b_next < 2147483648)",
        "(b_next >= -4294967296) & (b_next < 4294967296)"),
    bug("remainder kept when put aside", "gpu_exact.py", "        b_r = b_r * 0\n", ""),
    bug("remainder without its top bit", "gpu_exact.py", "_load(p_spill + o_x, m_x).to(tl.int64) & 0xFFFFFFFF",
        "_load(p_spill + o_x, m_x).to(tl.int64) & 0x7FFFFFFF"),
    bug("reciprocal too small", "gpu_exact.py", "bits = 2**31 // n + 1", "bits = 2**31 // n"),
    bug("lower digit of 20 bits", "gpu_exact.py", "b_high = (b_x >> 19)", "b_high = (b_x >> 20)",
        ("b_first * n) << 19)", "b_first * n) << 20)"), ("& 0x7FFFF)", "& 0xFFFFF)"),
        ("(b_first.to(tl.int64) << 19)", "(b_first.to(tl.int64) << 20)")),
    bug("gamma of f for what f read", "gpu_exact.py", "b_g + gpu._number(rest, tl.float32)",
        "b_g + gpu._number(gamma, tl.float32)"),
    bug("alarm of another half-step", "gpu_exact.py", "p_alarm += half_step * LANES", "p_alarm += half_step"),
    bug("alarm in another lane", "gpu_exact.py", "o_x % LANES", "o_x % (LANES // 2)"),
    bug("alarm of the last row alone", "gpu_exact.py", "b_worst = tl.maximum(b_worst, b_alarm)", "b_worst = b_alarm"),
    bug("floor off by one", "gpu_exact.py", "b_next - 17179869184,", "b_next - 17179869183,"),
    bug("initial state loaded without its mask", "gpu_exact.py", "_load(p_initial + o_x, m_x)",
        "_load(p_initial + o_x, None)"),
    # what it does not
    bug("contraction, in both states", "launch.py", "enable_fp_fusion=False", "enable_fp_fusion=True"),
    bug("extreme quotients not divided", "gpu.py", "%exponent_${:uid}, 1922;", "%exponent_${:uid}, 4294967295;"),
    bug("32-bit offset", "gpu.py",
        "    first = tl.program_id(0).to(tl.int64) * BLOCK\n    o_x = first + _offsets(BLOCK)\n"
        "    if first + BLOCK <= n:\n        _invert(",
        "    first = tl.program_id(0) * BLOCK\n    o_x = first + _offsets(BLOCK)\n"
        "    if first + BLOCK <= n:\n        _invert("),
    bug("32-bit offset of the exact state", "gpu_exact.py",
        "    first = tl.program_id(0).to(tl.int64) * BLOCK\n    o_x = first + gpu._offsets(BLOCK)\n"
        "    if first + BLOCK <= n:\n        _invert(",
        "    first = tl.program_id(0) * BLOCK\n    o_x = first + gpu._offsets(BLOCK)\n"
        "    if first + BLOCK <= n:\n        _invert("),
    bug("f loaded without its mask", "gpu.py", "_load(p_f + o_x, m_x)", "_load(p_f + o_x, None)"),
    bug("vjp loaded without its mask", "gpu.py", "_load(p_vjp + o_x, m_x)", "_load(p_vjp + o_x, None)"),
    bug("range of f before it is rounded", "gpu_exact.py", "b_fits = b_whole <", "b_fits = b_size <"),
    bug("stored twice, first by a neighbour", "gpu.py",
        "    tl.store(p_state + o_x, b_next, mask=m_x)\n    _store_rounded(p_copy + o_x, b_next, m_x)\n\n",
        "    tl.store(p_state + o_x, b_next, mask=m_x)\n"
        "    if m_x is None:\n        _store_rounded(p_copy + (o_x ^ 2), b_next, None)\n"
        "    _store_rounded(p_copy + o_x, b_next, m_x)\n\n"),
    bug("stored twice, first by the program before", "gpu.py",
        "    if first + BLOCK <= n:\n        _relax(",
        "    if first + 2 * BLOCK <= n:\n        _store_rounded(p_copy + BLOCK + o_x, o_x.to(tl.float64), None)\n"
        "    if first + BLOCK <= n:\n        _relax("),
    bug("half as many threads", "gpu.py", "THREADS = LANES // 2", "THREADS = LANES // 4"),
    bug("twice as many threads", "gpu.py", "THREADS = LANES // 2", "THREADS = LANES"),
    bug("barrier", "gpu.py", "    b_state = _load(p_state + o_x, m_x)\n    return b_state, _number",
        "    b_state = _load(p_state + o_x, m_x)\n    tl.debug_barrier()\n    return b_state, _number"),
    bug("always divided", "gpu.py", "if not self._by_reciprocal:", "if True:"),
    bug("beta is compiled for", "gpu.py", '@triton.jit(do_not_specialize=["n", "a", "b", "c"])\ndef _relax_kernel',
        '@triton.jit(do_not_specialize=["n"])\ndef _relax_kernel'),
    bug("full blocks masked", "gpu.py", "_relax(p_state, p_f, p_read, p_copy, o_x, None, a",
        "_relax(p_state, p_f, p_read, p_copy, o_x, o_x < n, a"),
    bug("small blocks in large states", "launch.py", "    if n < SMALL:", "    if True:"),
    bug("large blocks in small states", "launch.py", "    if n < SMALL:", "    if False:"),
    bug("float64 for the exact state", "gpu_exact.py", "(b_next - (b_state >> 32)).to(tl.float32) * UNIT",
        "((b_next - (b_state >> 32)).to(tl.float64) * UNIT).to(tl.float32)"),
    # a compiled kernel where another one belongs
    bug("for aligned pointers", "launch.py", "x.data_ptr() % 16 == 0", "True"),
    bug("for another dtype", "launch.py", "(x.dtype, x.data_ptr() % 16 == 0)", "(None, x.data_ptr() % 16 == 0)"),
    bug("for little memory", "launch.py", "x.untyped_storage().nbytes() < 2**31", "True"),
    bug("of another device", "launch.py", "kernel.fn, warps, device.index,", "kernel.fn, warps,"),
    bug("on another device", "launch.py", "    if active.get_current_device() == device.index:", "    if True:"),
    bug("with other constants", "launch.py", "device.index, constants, _types", "device.index, _types"),
    bug("with fewer threads", "launch.py", "kernel.fn, warps, device.index", "kernel.fn, device.index"),
    bug("for short numbers", "launch.py", "-(2**31) <= x < 2**31 for", "True for"),
    bug("unseen by who watches", "launch.py", "or _is_watched(kernel)", "or False"),
)  # fmt: skip
