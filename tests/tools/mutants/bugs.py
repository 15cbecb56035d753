"""The bugs: a file, and replacements of its text. Each replaced text occurs once in its file."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Bug:
    name: str
    file: str
    edits: tuple[tuple[str, str], ...]


def bug(name: str, file: str, old: str, new: str, *more: tuple[str, str]) -> Bug:
    return Bug(name, f"kernels/{file}", ((old, new), *more))


BUGS = (
    # Triton's interpreter notices these too
    bug("wrong sign", "gpu.py", "* b_state + _moved_by", "* b_state - _moved_by"),
    bug("b used for c", "gpu.py", "b_moved += passes.number(c", "b_moved += passes.number(b"),
    bug("wrong sign of the other adjoint", "gpu.py", "b_mixed = b_next + passes", "b_mixed = b_next - passes"),
    bug("wrong bit mask", "gpu.py", "& 0x7FFFFFFF", "& 0x7FFFFFFE"),
    bug("no floor", "gpu.py", "tl.maximum(_magnitude_bits(b_value), floor.to(tl.int32, bitcast=True))",
        "_magnitude_bits(b_value)"),
    bug("wrong offset of blocks", "passes.py", ".to(tl.int64) * SIZE, n\n", ".to(tl.int64) * (SIZE - 2), n\n"),
    bug("state not stored", "gpu.py", "((p_state, b_next), (p_copy, b_next))", "((p_copy, b_next),)"),
    bug("copy not stored", "gpu.py", "((p_state, b_previous), (p_copy, b_previous))", "((p_state, b_previous),)"),
    bug("sums of all chunks in one place", "passes.py", "(i * chunks + chunk) * LANES", "i * chunks * LANES"),
    bug("a row of a group left out", "passes.py", "o_x, n, left, GROUP - 1, LANES", "o_x, n, left, GROUP - 2, LANES"),
    bug("a row of a group added twice", "passes.py", "totals, o_x + LANES, n", "totals, o_x, n"),
    bug("rows of a group added in another order", "passes.py", "    totals = _with(totals, added)\n", "",
        ("    _store_all(stores, o_x, m_x)\n    return",
         "    totals = _with(totals, added)\n    _store_all(stores, o_x, m_x)\n    return")),
    bug("maximum of the last row only", "passes.py", "tl.maximum(totals[i], added[i])", "added[i]"),
    bug("weights swapped", "gpu.py",
        "b_old = passes.number(a, b_adjoint", "b_old = passes.number(b, b_adjoint",
        ("b_next = b_old + passes.number(b, b_adjoint", "b_next = b_old + passes.number(a, b_adjoint")),
    bug("seed not stored", "gpu.py", "stores += ((p_seed, passes.where(left, 0, b_next, 0.0)),)", "pass"),
    bug("f in float32", "gpu.py", "load(p_f, o_x, m_x).to(tl.float64)", "load(p_f, o_x, m_x).to(tl.float32)"),
    bug("coefficients in float32", "gpu.py", "tuple(bits_of(x, self._dtype) for x in",
        "tuple(bits_of(struct.unpack('<f', struct.pack('<f', x))[0], self._dtype) for x in"),
    bug("truncated instead of rounded", "gpu_exact.py", "(b_size + 8388608.0) - 8388608.0", "b_size"),
    bug("sign of f ignored", "gpu_exact.py", "tl.where(b_scaled < 0.0, -b_number, b_number).to(tl.int64), b_fits",
        "b_number.to(tl.int64), b_fits"),
    bug("wrong range of f", "gpu_exact.py", "b_fits = b_whole < 2147483648.0", "b_fits = b_whole <= 2147483648.0"),
    bug("change of the state in 32 bits", "gpu_exact.py", "(b_next - (b_state >> 32)).to(tl.float32)",
        "(b_next - (b_state >> 32)).to(tl.int32).to(tl.float32)"),
    bug("wrong range of the state", "gpu_exact.py", "(b_next >= -2147483648) & (b_next < 2147483648)",
        "(b_next >= -4294967296) & (b_next < 4294967296)"),
    bug("remainder kept after a spill", "gpu_exact.py", "b_old if p_spill is None else b_old * 0", "b_old"),
    bug("remainder without its top bit", "gpu_exact.py", "load(p_spill, o_x, m_x).to(tl.int64) & 0xFFFFFFFF",
        "load(p_spill, o_x, m_x).to(tl.int64) & 0x7FFFFFFF"),
    bug("reciprocal too small", "gpu_exact.py", "bits = 2**31 // n + 1", "bits = 2**31 // n"),
    bug("lower digit of 20 bits", "gpu_exact.py", "b_high = (b_x >> 19)", "b_high = (b_x >> 20)",
        ("b_first * n) << 19)", "b_first * n) << 20)"), ("& 0x7FFFF)", "& 0xFFFFF)"),
        ("(b_first.to(tl.int64) << 19)", "(b_first.to(tl.int64) << 20)")),
    bug("gamma used for 1 - gamma", "gpu_exact.py", "b_g + passes.number(rest, tl.float32)",
        "b_g + passes.number(gamma, tl.float32)"),
    bug("alarm in another half-step", "gpu_exact.py", "BLOCK, p_alarm + half_step * LANES, LANES",
        "BLOCK, p_alarm + half_step, LANES"),
    bug("alarm in another lane", "passes.py", "o_x % LANES", "o_x % (LANES // 2)"),
    bug("floor off by one", "gpu_exact.py", "b_next - 17179869184,", "b_next - 17179869183,"),
    bug("initial state loaded without its mask", "gpu_exact.py", "load(p_initial, o_x, m_x)",
        "load(p_initial, o_x, None)"),
    # the interpreter does not notice these
    bug("contraction, in both states", "launch.py", "enable_fp_fusion=False", "enable_fp_fusion=True"),
    bug("extreme quotients not divided", "gpu.py", "%exponent_${:uid}, 1922;", "%exponent_${:uid}, 4294967295;"),
    bug("32-bit offset", "passes.py", "tl.program_id(0).to(tl.int64) * SIZE, n\n", "tl.program_id(0) * SIZE, n\n"),
    bug("f loaded without its mask", "gpu.py", "load(p_f, o_x, m_x)", "load(p_f, o_x, None)"),
    bug("vjp loaded without its mask", "gpu.py", "load(p_vjp, o_x, m_x)", "load(p_vjp, o_x, None)"),
    bug("range of f checked before rounding", "gpu_exact.py", "b_fits = b_whole <", "b_fits = b_size <"),
    bug("stored twice, first by a neighbouring thread", "passes.py", "    tl.store(p_x + o_x, b_x",
        "    if m_x is None:\n        tl.store(p_x + (o_x ^ 2), b_x.to(p_x.dtype.element_ty))\n"
        "    tl.store(p_x + o_x, b_x"),
    bug("stored twice, first by the program before", "gpu.py", "    passes.each_block(_relax,",
        "    o_next = (tl.program_id(0).to(tl.int64) + 1) * BLOCK + passes.offsets(BLOCK)\n"
        "    passes._store(p_copy, o_next.to(tl.float64), o_next, o_next < n)\n    passes.each_block(_relax,"),
    bug("half as many threads", "gpu.py", "THREADS = LANES // 2", "THREADS = LANES // 4"),
    bug("twice as many threads", "gpu.py", "THREADS = LANES // 2", "THREADS = LANES"),
    bug("unnecessary barrier", "gpu.py", "    b_change = b_next - b_state\n",
        "    tl.debug_barrier()\n    b_change = b_next - b_state\n"),
    bug("division instruction always used", "gpu.py", "if not self._by_reciprocal:", "if True:"),
    bug("kernel compiled for each beta", "gpu.py", 'NUMBERS = ["n", *EACH, "a", "b", "c",',
        'NUMBERS = ["n", *EACH,'),
    bug("full blocks masked", "passes.py", "_block(OPERATION, pointers, numbers, o_x, None,",
        "_block(OPERATION, pointers, numbers, o_x, n,"),
    bug("small blocks in large states", "launch.py", "    if n < SMALL or", "    if True or"),
    bug("large blocks in small states", "launch.py", "    if n < SMALL or", "    if False or"),
    bug("float64 for the exact state", "gpu_exact.py", "(b_next - (b_state >> 32)).to(tl.float32) * UNIT",
        "((b_next - (b_state >> 32)).to(tl.float64) * UNIT).to(tl.float32)"),
    # examples that take different numbers of half-steps
    bug("frozen example moved", "gpu.py", "passes.where(left, 1, b_next, b_state)", "b_next"),
    bug("frozen example inverted", "gpu.py",
        "passes.where(left, 1, _previous(b_state, p_f, p_read, o_x, m_x, step), b_state)",
        "_previous(b_state, p_f, p_read, o_x, m_x, step)"),
    bug("adjoint of a frozen example decays", "gpu.py", "tl.where(left > 1, b_old", "tl.where(left > 0, b_old"),
    bug("other adjoint added in a frozen example", "gpu.py", "passes.where(left, 1, b_mixed, b_next)", "b_mixed"),
    bug("seed of a frozen example not 0", "gpu.py", "passes.where(left, 0, b_next, 0.0)", "b_next"),
    bug("seed 0 one half-step too early", "gpu.py", "passes.where(left, 0, b_next, 0.0)",
        "passes.where(left, 1, b_next, 0.0)"),
    bug("end of another example", "passes.py", "tl.load(each[0] + example)", "tl.load(each[0] + example * 0)"),
    bug("chunk spans two examples", "passes.py", ".to(tl.int64) * SIZE, begin + length\n",
        ".to(tl.int64) * SIZE, n\n"),
    bug("length of examples rounded down", "gpu.py", "h.state.numel() % (16 *", "h.state.numel() % (8 *"),
    bug("remainder of a frozen example lost", "gpu_exact.py", "passes.where(left, 1, b_r, b_old)", "b_r"),
    bug("alarm of a frozen example", "gpu_exact.py", "b_alarm = passes.where(left, 1, b_alarm, 0)", "pass"),
    # a cached kernel launched with the wrong arguments
    bug("cache ignores alignment", "launch.py", "x.data_ptr() % 16 == 0", "True"),
    bug("cache ignores dtypes", "launch.py", "(x.dtype, x.data_ptr() % 16 == 0)", "(None, x.data_ptr() % 16 == 0)"),
    bug("cache ignores sizes above 2 GiB", "launch.py", "x.untyped_storage().nbytes() < 2**31", "True"),
    bug("cache ignores the device", "launch.py", "kernel.fn, warps, device.index,", "kernel.fn, warps,"),
    bug("launched on the current device", "launch.py", "if active.get_current_device() == device.index:", "if True:"),
    bug("cache ignores constants", "launch.py", "device.index, constants, _types", "device.index, _types"),
    bug("cache ignores the number of warps", "launch.py", "kernel.fn, warps, device.index", "kernel.fn, device.index"),
    bug("cache ignores 64-bit numbers", "launch.py", "-(2**31) <= x < 2**31 for", "True for"),
    bug("launch hooks ignored", "launch.py", "or _is_watched(kernel)", "or False"),
)  # fmt: skip
