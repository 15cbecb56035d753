/* The half-steps of the integer state on the CPU; reference_exact.py is their specification.
 *
 * A half-step and its inverse are one function, with p and d exchanged:
 *
 *     e = R mod from, R = floor(R / from)
 *     T = sign (from Y + e) + weight F
 *     Y = floor(T / to), R = R to + (T mod to)
 *
 * It processes a row of LANES elements at a time, which stays in the L1 cache. f is converted before it and Y after it:
 * only these conversions depend on dtypes. */
#include "common.h"

typedef struct { int32_t from, to, sign, weight; } radix;

INLINE radix radix_of(const call *c) {
    if (c->inverse)
        return (radix){c->d, c->p, c->sign, c->p - c->sign * c->d};
    return (radix){c->p, c->d, c->sign, c->d - c->sign * c->p};
}

INLINE double unit(const call *c) { return 1.0 / (double)((int64_t)1 << c->bits); }

INLINE uint64_t word_of(double x) { uint64_t u; memcpy(&u, &x, 8); return u; }
INLINE double double_of(uint64_t u) { double x; memcpy(&x, &u, 8); return x; }

/* Adding ROUND rounds a double to an integer, whose two's complement is then in the low bits. */
#define ROUND 0x1.8p52
#define LOW 0xFFFFFFFFu

/* floor(x / n) = round(x / n + OFFSET(n)), which for integers |x| < 2^42 and n <= 64 is never near a tie. */
#define OFFSET(n) ((0.5 - (n) / 2.0) / (n))

/* The halves of a word as doubles, without leaving 64-bit lanes: the low bits of 2^52 + u are u. */
INLINE double high(int64_t word) {
    return double_of((uint64_t)word >> 32 ^ (word_of(0x1p52) | 0x80000000u)) - (0x1p52 + 0x1p31);
}
INLINE double low(int64_t word) { return double_of(((uint64_t)word & LOW) | word_of(0x1p52)) - 0x1p52; }

/* Steps one row in doubles, which represent all these integers exactly and are vectorised on every CPU. Also stores Y
 * in y. Returns whether a Y did not fit into 32 bits, which only happens if sign < 0. The flags are constants in every
 * call: whether from, and whether to, is not 1. */
INLINE int step_loop(int64_t *state, const int32_t *f, int32_t *y, int64_t n, radix radix, const int divide_first,
                     const int divide_last) {
    const double from = radix.from, to = radix.to, sign = radix.sign, weight = radix.weight;
    const double inverse_from = 1 / from, inverse_to = 1 / to;
    uint64_t outside = 0;
#pragma omp simd reduction(| : outside)
    for (int64_t i = 0; i < n; i++) {
        double r = low(state[i]), rest = divide_first ? (r * inverse_from + OFFSET(from)) + ROUND - ROUND : r;
        double t = sign * (from * high(state[i]) + (r - rest * from)) + weight * f[i];
        if (!divide_first)
            t = sign * high(state[i]) + weight * f[i];
        double next = divide_last ? (t * inverse_to + OFFSET(to)) + ROUND : t + ROUND;
        double remainder = divide_last ? rest * to + (t - (next - ROUND) * to) : rest;
        outside |= word_of(next) - word_of(ROUND - 0x1p31);
        state[i] = (int64_t)(word_of(next) << 32 | (word_of(remainder + ROUND) & LOW));
        y[i] = (int32_t)(word_of(next) & LOW);
    }
    return outside >> 32 != 0;
}

/* gamma f + (1 - gamma) z, or f without `mix`, in units of 2^-G, rounded to the nearest even. What does not fit into
 * 32 bits becomes 0 and sets `bad`. */
#define INTEGERS(REAL, RINT, FABS, LIMIT)                                                        \
    for (int64_t i = 0; i < n; i++) {                                                            \
        REAL g = (REAL)load(f, i, f_type);                                                       \
        if (mix)                                                                                 \
            g = (REAL)gamma * g + (REAL)(1 - gamma) * (REAL)load(read, i, copy_type);            \
        REAL whole = RINT(g * (REAL)scale);                                                      \
        int fits = FABS(whole) < LIMIT;                                                          \
        number[i] = (int32_t)(fits ? whole : 0);                                                 \
        bad |= !fits;                                                                            \
    }

INLINE int integers_loop(const void *f, const void *read, int32_t *number, int64_t n, double gamma, double scale,
                         enum dtype f_type, enum dtype copy_type, const int mix) {
    int bad = 0;
    if (f_type == F64 || (mix && copy_type == F64)) {
#pragma omp simd reduction(| : bad)
        INTEGERS(double, rint, fabs, 0x1p31)
    } else {
#pragma omp simd reduction(| : bad)
        INTEGERS(float, rintf, fabsf, 0x1p31f)
    }
    return bad;
}

INLINE void decode_loop(const int32_t *y, void *copy, int64_t n, double unit, enum dtype type) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++)
        store(copy, i, type, type == F64 ? y[i] * unit : (float)y[i] * (float)unit);
}

/* Calls with constant dtypes. Elements [row, row + n) of a tensor, in units of 2^-G. */
INLINE int integers(const call *c, const void *x, int type, const void *z, int64_t row, int32_t *number, int64_t n) {
    const double scale = 1 / unit(c), gamma = c->gamma;
    int bad = 0;
    if (z)
        CONSTANT(F, type, CONSTANT(C, c->copy_type,
            bad = integers_loop(at(x, row, F), at(z, row, C), number, n, gamma, scale, F, C, 1)))
    else
        CONSTANT(F, type, bad = integers_loop(at(x, row, F), NULL, number, n, 1, scale, F, F, 0))
    return bad;
}

/* Converts f and steps a row of the state, and stores Y in y. Returns whether an f or a Y did not fit. */
INLINE int step_row(const call *c, int64_t *state, int64_t row, int64_t n, int32_t *y) {
    const radix radix = radix_of(c);
    int32_t number[LANES];
    int bad = integers(c, c->f, c->f_type, c->z, row, number, n);
    if (radix.from == 1)
        return bad | step_loop(state, number, y, n, radix, 0, 1);
    if (radix.to == 1)
        return bad | step_loop(state, number, y, n, radix, 1, 0);
    return bad | step_loop(state, number, y, n, radix, 1, 1);
}

#define FOR_EACH_ROW                                                                                               \
    for (int64_t row = p.from, end = row + p.n, n; n = end - row < LANES ? end - row : LANES, row < end; row += LANES)

/* A half-step with a spill saves the remainder there, and restarts from 0. Its inverse restores it from there. */
INLINE int step(const call *c, part p, const int inverse) {
    const float last_bit = (float)unit(c);
    float *sums = inverse ? NULL : c->sums, *change = NULL, *value = NULL;
    int bad = 0;
    if (sums) {
        change = sums + p.chunk * LANES, value = change + p.chunks * LANES;
        memset(change, 0, LANES * sizeof *change);
        memset(value, 0, LANES * sizeof *value);
    }
    FOR_EACH_ROW {
        int64_t *state = (int64_t *)c->state + row, before[LANES];
        int32_t y[LANES];
        if (sums)
            memcpy(before, state, n * sizeof *state);
        if (c->spill && !inverse)
            for (int64_t i = 0; i < n; i++) {
                c->spill[row + i] = (int32_t)(uint32_t)state[i];
                state[i] = (int64_t)((uint64_t)state[i] & ~(uint64_t)LOW);
            }
        bad |= step_row(c, state, row, n, y);
        CONSTANT(C, c->copy_type, decode_loop(y, at(c->copy, row, C), n, unit(c), C))
        if (c->spill && inverse)
            for (int64_t i = 0; i < n; i++)
                state[i] = (int64_t)(((uint64_t)state[i] & ~(uint64_t)LOW) | (uint32_t)c->spill[row + i]);
        if (sums)
            for (int64_t i = 0; i < n; i++) {
                float moved = (float)(y[i] - high(before[i])) * last_bit, size = (float)y[i] * last_bit;
                change[i] += moved * moved;
                value[i] += size * size;
            }
    }
    return bad;
}

CLONES static int relax(const call *c, part p) { return step(c, p, 0); }
CLONES static void invert(const call *c, part p) { step(c, p, 1); }

/* A nonzero remainder in the initial state is an error too. */
CLONES static void compare(const call *c, part p) {
    const float last_bit = (float)unit(c), floor = *c->floor;
    int32_t *worst = c->worst + p.chunk * LANES;
    memset(worst, 0, LANES * sizeof *worst);
    FOR_EACH_ROW {
        const int64_t *state = (const int64_t *)c->state + row;
        int64_t before[LANES];
        int32_t y[LANES], start[LANES];
        memcpy(before, state, n * sizeof *state);
        integers(c, c->copy, c->copy_type, NULL, row, start, n);
        step_row(c, before, row, n, y);
        for (int64_t i = 0; i < n; i++) {
            float difference = (float)((double)y[i] - start[i]) * last_bit + (float)low(before[i]);
            int32_t bits = ratio_bits(difference, (float)high(state[i]) * last_bit, floor);
            worst[i] = bits > worst[i] ? bits : worst[i];
        }
    }
}

static int step_chunk(const call *c, part p) {
    if (!c->inverse)
        return relax(c, p);
    c->floor ? compare(c, p) : invert(c, p);
    update_adjoint(c, p);
    return 0;
}

/* Returns whether an f or a Y of a half-step did not fit. */
API int revdeq_exact(const call *c) { return each_chunk(c, step_chunk); }
