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
        'is p_copy."""\n    start = block.to(tl.int64) * BLOCK\n',
        'is p_copy."""\n    start = block.to(tl.int64) * (BLOCK - 2)\n'),
    bug("state not stored", "gpu.py", "    tl.store(p_state + o_x, b_next, mask=m_x)\n", ""),
    bug("copy not stored", "gpu.py", "    _store_copy(p_copy + o_x, b_previous, m_x)\n", ""),
    bug("sums in one place", "gpu.py", "p_first = p_partial + chunk * LANES", "p_first = p_partial"),
    bug("weights swapped", "gpu.py",
        "_number(a, b_adjoint.dtype) * b_adjoint + _number(b, b_adjoint.dtype)",
        "_number(b, b_adjoint.dtype) * b_adjoint + _number(a, b_adjoint.dtype)"),
    bug("f in float32", "gpu.py", "_number(b, tl.float64) * b_f.to(tl.float64)",
        "_number(b, tl.float64) * b_f.to(tl.float32)"),
    bug("coefficients in float32", "gpu.py", "tuple(bits_of(x, self._dtype) for x in",
        "tuple(bits_of(struct.unpack('<f', struct.pack('<f', x))[0], self._dtype) for x in"),
    bug("truncated", "gpu_exact.py", "(b_size + 8388608.0) - 8388608.0", "b_size"),
    bug("sign of f", "gpu_exact.py", "tl.where(b_scaled < 0.0, -b_number, b_number).to(tl.int64), b_fits",
        "b_number.to(tl.int64), b_fits"),
    bug("range of f", "gpu_exact.py", "b_fits = b_whole < 2147483648.0", "b_fits = b_whole <= 2147483648.0"),
    bug("jump in 32 bits", "gpu_exact.py", "(b_next - b_y).to(tl.float32)",
        "(b_next - b_y).to(tl.int32).to(tl.float32)"),
    bug("range of the state", "gpu_exact.py", "(b_next >= -2147483648) & (b_next < 2147483648)",
        "(b_next >= -4294967296) & (b_next < 4294967296)"),
    bug("remainder kept when put aside", "gpu_exact.py", "        b_r = b_r * 0\n", ""),
    bug("remainder without its top bit", "gpu_exact.py", "b_spill.to(tl.int64) & 0xFFFFFFFF",
        "b_spill.to(tl.int64) & 0x7FFFFFFF"),
    bug("reciprocal too small", "gpu_exact.py", "bits = 2**31 // n + 1", "bits = 2**31 // n"),
    bug("lower digit of 20 bits", "gpu_exact.py", "b_high = (b_x >> 19)", "b_high = (b_x >> 20)",
        ("b_first * n) << 19)", "b_first * n) << 20)"), ("& 0x7FFFF)", "& 0xFFFFF)"),
        ("(b_first.to(tl.int64) << 19)", "(b_first.to(tl.int64) << 20)")),
    bug("gamma of f for what f read", "gpu_exact.py", "b_g + gpu._number(rest, tl.float32)",
        "b_g + gpu._number(gamma, tl.float32)"),
    bug("alarm of another half-step", "gpu_exact.py",
        "p_alarm += half_step * LANES\n    if p_read is not None:\n        p_read += first\n"
        "    if p_spill is not None:\n        p_spill += first\n    o_lane",
        "p_alarm += half_step\n    if p_read is not None:\n        p_read += first\n"
        "    if p_spill is not None:\n        p_spill += first\n    o_lane"),
    bug("floor off by one", "gpu_exact.py", "b_next - 17179869184,", "b_next - 17179869183,"),
    bug("initial state loaded without its mask", "gpu_exact.py", "_load(p_initial + o_x, m_x)",
        "_load(p_initial + o_x, None)"),
    # what it does not
    bug("contraction, in both states", "launch.py", "enable_fp_fusion=False", "enable_fp_fusion=True"),
    bug("extreme quotients not divided", "gpu.py", "%exponent_${:uid}, 1922;", "%exponent_${:uid}, 4294967295;"),
    bug("32-bit offset", "gpu.py", 'is p_copy."""\n    start = block.to(tl.int64) * BLOCK\n',
        'is p_copy."""\n    start = block * BLOCK\n'),
    bug("32-bit offset of the exact state", "gpu_exact.py",
        'is p_copy."""\n    first = block.to(tl.int64) * BLOCK\n',
        'is p_copy."""\n    first = block * BLOCK\n'),
    bug("f loaded without its mask", "gpu.py",
        "    b_f = tl.load(p_f + o_x, mask=m_x)\n"
        "    b_read = None if p_read is None else tl.load(p_read + o_x, mask=m_x)\n    b_next",
        "    b_f = tl.load(p_f + o_x)\n"
        "    b_read = None if p_read is None else tl.load(p_read + o_x, mask=m_x)\n    b_next"),
    bug("vjp loaded without its mask", "gpu.py", "\n        b_vjp = tl.load(p_vjp + o_x, mask=m_x)\n",
        "\n        b_vjp = tl.load(p_vjp + o_x)\n"),
    bug("range of f before it is rounded", "gpu_exact.py", "b_fits = b_whole <", "b_fits = b_size <"),
    bug("stored twice, first by a neighbour", "gpu.py", "    _store_copy(p_copy + o_x, b_next, m_x)\n",
        "    if m_x is None:\n        _store_copy(p_copy + (o_x ^ 2), b_next, None)\n"
        "    _store_copy(p_copy + o_x, b_next, m_x)\n"),
    bug("stored twice, first by the program before", "gpu.py",
        "    if start + BLOCK <= n:\n        _relax_block",
        "    if start + 2 * BLOCK <= n:\n        _store_copy(p_copy + BLOCK + o_x, o_x.to(tl.float64), None)\n"
        "    if start + BLOCK <= n:\n        _relax_block"),
    bug("half as many threads", "gpu.py", "THREADS = LANES // 2", "THREADS = LANES // 4"),
    bug("twice as many threads", "gpu.py", "THREADS = LANES // 2", "THREADS = LANES"),
    bug("barrier", "gpu.py", "    b_next = _number(a, tl.float64) * b_state",
        "    tl.debug_barrier()\n    b_next = _number(a, tl.float64) * b_state"),
    bug("always divided", "gpu.py", "if not self._by_reciprocal:", "if True:"),
    bug("beta is compiled for", "gpu.py", '@triton.jit(do_not_specialize=["n", "a", "b", "c"])\ndef _relax_kernel',
        '@triton.jit(do_not_specialize=["n"])\ndef _relax_kernel'),
    bug("full blocks masked", "gpu.py", "_relax_block(p_state, p_f, p_read, p_copy, o_x, None, a",
        "_relax_block(p_state, p_f, p_read, p_copy, o_x, o_x < n - start, a"),
    bug("float64 for the exact state", "gpu_exact.py", "(b_next - b_y).to(tl.float32) * UNIT",
        "((b_next - b_y).to(tl.float64) * UNIT).to(tl.float32)"),
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
    # the leaves of a state
    bug("a leaf begins a program late", "gpu.py", "program >= _plain(first[i])", "program > _plain(first[i])"),
    bug("blocks of another leaf", "gpu.py",
        "_plain(_of(n, first, at)), at - _plain(_of(first, first, at)), a, b, c, BLOCK,",
        "_plain(_of(n, first, at)), at, a, b, c, BLOCK,"),
    bug("what another leaf's f returned", "gpu_exact.py",
        "_of(p_state, first, at), gpu._of(p_f, first, at), gpu._of(p_read, first, at), gpu._of(p_copy, first, at),\n"
        "        gpu._of(p_adjoint",
        "_of(p_state, first, at), p_f[0], gpu._of(p_read, first, at), gpu._of(p_copy, first, at),\n"
        "        gpu._of(p_adjoint"),
    bug("sums of one leaf among those of another", "gpu.py", "tl.cdiv(n_leaf, ROWS * LANES)", "tl.num_programs(0)"),
    bug("a leaf is the last of those before it", "launch.py", "itertools.accumulate(counts, initial=0)",
        "itertools.accumulate((c - 1 for c in counts), initial=0)"),
    bug("leaves that are not aligned alike", "launch.py", "if row[1] == kinds and row[0] == what",
        "if row[0] == what", ("if row[1] != kinds or row[0] != what", "if row[0] != what")),
    bug("leaves of different steps", "launch.py", "if row[1] == kinds and row[0] == what",
        "if row[1] == kinds", ("if row[1] != kinds or row[0] != what", "if row[1] != kinds")),
    bug("sizes of leaves are compiled for", "launch.py", "2 * x + 3", "2 * x + 2"),
)  # fmt: skip
