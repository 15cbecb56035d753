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

typedef struct {
    int32_t from, to, sign, weight;
} radix;

INLINE radix there(const half_step *h) { return (radix){h->p, h->d, h->sign, h->d - h->sign * h->p}; }
INLINE radix back(const half_step *h) { return (radix){h->d, h->p, h->sign, h->p - h->sign * h->d}; }
INLINE double unit(const half_step *h) { return 1.0 / (double)((int64_t)1 << h->bits); }

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
 * in y. Returns whether a Y did not fit into 32 bits, which only happens if sign < 0. */
CLONES static int step_by_doubles(int64_t *state, const int32_t *f, int32_t *y, int64_t n, radix radix) {
    const double from = radix.from, to = radix.to, sign = radix.sign, weight = radix.weight;
    const double inverse_from = 1 / from, inverse_to = 1 / to;
    uint64_t outside = 0;
#pragma omp simd reduction(| : outside)
    for (int64_t i = 0; i < n; i++) {
        double r = low(state[i]), rest = (r * inverse_from + OFFSET(from)) + ROUND - ROUND;
        double t = sign * (from * high(state[i]) + (r - rest * from)) + weight * f[i];
        double next = (t * inverse_to + OFFSET(to)) + ROUND;
        double remainder = rest * to + (t - (next - ROUND) * to);
        outside |= word_of(next) - word_of(ROUND - 0x1p31);
        state[i] = (int64_t)(word_of(next) << 32 | (word_of(remainder + ROUND) & LOW));
        y[i] = (int32_t)(word_of(next) & LOW);
    }
    return outside >> 32 != 0;
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2")))

/* The same with AVX2's product of the low halves of 64-bit lanes, which takes half the time and which compilers do not
 * generate. n is a multiple of 8, and the flags are constants in every call. With `floats`, f and copy are float32 and
 * converted here, in float32: an f that does not fit becomes -2^31, which no valid f does. */
AVX2 INLINE int step_by_avx2(int64_t *state, const void *f, int32_t *y, float *copy, int64_t n, radix radix, float unit,
                             const int floats, const int divide_first, const int divide_last, const int may_overflow) {
    const __m256i from = _mm256_set1_epi64x(radix.from), to = _mm256_set1_epi64x(radix.to);
    const __m256i factor = _mm256_set1_epi64x(radix.sign * radix.from), weight = _mm256_set1_epi64x(radix.weight);
    const __m256i sign = _mm256_set1_epi64x(radix.sign), lowest = _mm256_castpd_si256(_mm256_set1_pd(ROUND - 0x1p31));
    const __m256d inverse_from = _mm256_set1_pd(1.0 / radix.from), inverse_to = _mm256_set1_pd(1.0 / radix.to);
    const __m256d offset_from = _mm256_set1_pd(OFFSET(radix.from)), offset_to = _mm256_set1_pd(OFFSET(radix.to));
    const __m256d round = _mm256_set1_pd(ROUND), two_52 = _mm256_set1_pd(0x1p52);
    const __m256i no_number = _mm256_set1_epi32(INT32_MIN);
    __m256i outside = _mm256_setzero_si256(), bad = _mm256_setzero_si256();
    for (int64_t i = 0; i < n; i += 8) {
        __m256i eight, next[2];
        if (floats) {
            __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps((const float *)f + i), _mm256_set1_ps(1 / unit));
            eight = _mm256_cvtps_epi32(scaled);
            bad = _mm256_or_si256(bad, _mm256_cmpeq_epi32(eight, no_number));
        } else {
            eight = _mm256_loadu_si256((const __m256i *)((const int32_t *)f + i));
        }
        eight = _mm256_permute4x64_epi64(eight, 0xD8);
        for (int half = 0; half < 2; half++) {
            __m256i *p = (__m256i *)(state + i + 4 * half), word = _mm256_loadu_si256(p), rest = word;
            __m256i four = half ? _mm256_unpackhi_epi32(eight, eight) : _mm256_unpacklo_epi32(eight, eight);
            __m256i t = _mm256_add_epi64(_mm256_mul_epi32(_mm256_srli_epi64(word, 32), factor),
                                         _mm256_mul_epi32(four, weight));
            if (divide_first) {
                __m256i r = _mm256_blend_epi32(word, _mm256_castpd_si256(two_52), 0xAA);
                __m256d quotient = _mm256_mul_pd(_mm256_sub_pd(_mm256_castsi256_pd(r), two_52), inverse_from);
                rest = _mm256_castpd_si256(_mm256_add_pd(_mm256_add_pd(quotient, offset_from), round));
                __m256i e = _mm256_sub_epi64(word, _mm256_mul_epu32(rest, from));
                t = _mm256_add_epi64(t, _mm256_mul_epi32(e, sign));
            }
            next[half] = t;
            __m256i remainder = rest;
            if (divide_last) {
                __m256i sum = _mm256_add_epi64(t, _mm256_castpd_si256(round));
                __m256d quotient = _mm256_mul_pd(_mm256_sub_pd(_mm256_castsi256_pd(sum), round), inverse_to);
                next[half] = _mm256_castpd_si256(_mm256_add_pd(_mm256_add_pd(quotient, offset_to), round));
                remainder = _mm256_add_epi64(_mm256_mul_epu32(rest, to),
                                             _mm256_sub_epi64(t, _mm256_mul_epi32(next[half], to)));
            }
            if (may_overflow)
                outside = _mm256_or_si256(outside, _mm256_sub_epi64(next[half], lowest));
            _mm256_storeu_si256(p, _mm256_blend_epi32(_mm256_slli_epi64(next[half], 32), remainder, 0x55));
        }
        __m256 low_halves = _mm256_shuffle_ps(_mm256_castsi256_ps(next[0]), _mm256_castsi256_ps(next[1]), 0x88);
        eight = _mm256_permute4x64_epi64(_mm256_castps_si256(low_halves), 0xD8);
        _mm256_storeu_si256((__m256i *)(y + i), eight);
        if (floats && copy)
            _mm256_storeu_ps(copy + i, _mm256_mul_ps(_mm256_cvtepi32_ps(eight), _mm256_set1_ps(unit)));
    }
    return !_mm256_testz_si256(outside, _mm256_set1_epi64x((long long)0xFFFFFFFF00000000)) |
           !_mm256_testz_si256(bad, bad);
}

/* Selects the flags for a radix. */
AVX2 INLINE int step_eights_of(int64_t *state, const void *f, int32_t *y, float *copy, int64_t n, radix radix,
                               float unit, const int floats) {
    if (radix.to == 1)
        return step_by_avx2(state, f, y, copy, n, radix, unit, floats, 1, 0, 0);
    if (radix.from == 1)
        return radix.sign < 0 ? step_by_avx2(state, f, y, copy, n, radix, unit, floats, 0, 1, 1)
                              : step_by_avx2(state, f, y, copy, n, radix, unit, floats, 0, 1, 0);
    return radix.sign < 0 ? step_by_avx2(state, f, y, copy, n, radix, unit, floats, 1, 1, 1)
                          : step_by_avx2(state, f, y, copy, n, radix, unit, floats, 1, 1, 0);
}

AVX2 static int step_eights(int64_t *state, const int32_t *f, int32_t *y, int64_t n, radix radix) {
    return step_eights_of(state, f, y, NULL, n, radix, 1, 0);
}

AVX2 static int step_eights_of_floats(int64_t *state, const float *f, int32_t *y, float *copy, int64_t n, radix radix,
                                      float unit) {
    return step_eights_of(state, f, y, copy, n, radix, unit, 1);
}

#define EIGHTS(n) (__builtin_cpu_supports("avx2") ? (n) & ~(int64_t)7 : 0)
#else
#define EIGHTS(n) 0
#define step_eights(...) 0
#define step_eights_of_floats(...) 0
#endif

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

CLONES static int integers(const half_step *h, const void *f, int f_type, const void *z, int z_type, int64_t row,
                           int32_t *number, int64_t n) {
    int bad = 0;
    const double scale = 1 / unit(h);
    if (z)
        CONSTANT(F, f_type, CONSTANT(C, z_type,
            bad = integers_loop(at(f, row, F), at(z, row, C), number, n, h->gamma, scale, F, C, 1)))
    else
        CONSTANT(F, f_type, bad = integers_loop(at(f, row, F), NULL, number, n, 1, scale, F, F, 0))
    return bad;
}

/* Converts f and steps one row of the state. Stores Y in y and decodes it into copy, which may be NULL. z may be NULL,
 * or equal to copy, which is written last. Returns whether an f or a Y did not fit. */
INLINE int step_row(const half_step *h, int64_t *state, const void *f, int f_type, const void *z, void *copy,
                    int copy_type, int64_t row, int64_t lanes, int32_t *y, radix radix) {
    int32_t number[LANES];
    int64_t eights = EIGHTS(lanes), rest = lanes;
    int bad = 0;
    if (eights && f_type == F32 && !z && (!copy || copy_type == F32)) {
        bad = step_eights_of_floats(state, (const float *)f + row, y, copy ? (float *)copy + row : NULL, eights, radix,
                                    (float)unit(h));
        if (eights == lanes)
            return bad;
        state += eights, y += eights, row += eights, rest = lanes - eights, eights = 0;
    }
    bad |= integers(h, f, f_type, z, copy_type, row, number, rest);
    if (eights)
        bad |= step_eights(state, number, y, eights, radix);
    if (eights < rest)
        bad |= step_by_doubles(state + eights, number + eights, y + eights, rest - eights, radix);
    if (copy)
        CONSTANT(C, copy_type, decode_loop(y, at(copy, row, C), rest, unit(h), C))
    return bad;
}

#define FOR_EACH_ROW(...)                                                                \
    for (int64_t row = from, end = from + n; row < end; row += LANES) {                  \
        const int64_t lanes = end - row < LANES ? end - row : LANES;                     \
        int64_t *const state = (int64_t *)h->state + row;                                \
        int32_t y[LANES];                                                                \
        __VA_ARGS__                                                                      \
    }

/* Returns whether an f or a Y did not fit. spill may be NULL, and so may change and value. */
CLONES static int relax_chunk(const half_step *h, const void *f, int f_type, const void *z, void *copy, int copy_type,
                              int64_t from, int64_t n, int32_t *spill, float *change, float *value) {
    int bad = 0;
    if (change) {
        memset(change, 0, LANES * sizeof *change);
        memset(value, 0, LANES * sizeof *value);
    }
    FOR_EACH_ROW(
        int64_t before[LANES];
        if (change)
            memcpy(before, state, lanes * sizeof *state);
        if (spill)
            for (int64_t i = 0; i < lanes; i++) {
                spill[row + i] = (int32_t)(uint32_t)state[i];
                state[i] = (int64_t)((uint64_t)state[i] & ~(uint64_t)LOW);
            }
        bad |= step_row(h, state, f, f_type, z, copy, copy_type, row, lanes, y, there(h));
        if (change)
            for (int64_t i = 0; i < lanes; i++) {
                float moved = (float)(y[i] - high(before[i])) * (float)unit(h), size = (float)y[i] * (float)unit(h);
                change[i] += moved * moved;
                value[i] += size * size;
            }
    )
    return bad;
}

/* With a spill, the remainder is restored from there. */
CLONES static void invert_chunk(const half_step *h, const void *f, int f_type, const void *z, void *copy,
                                int copy_type, int64_t from, int64_t n, const int32_t *spill) {
    FOR_EACH_ROW(
        step_row(h, state, f, f_type, z, copy, copy_type, row, lanes, y, back(h));
        if (spill)
            for (int64_t i = 0; i < lanes; i++)
                state[i] = (int64_t)(((uint64_t)state[i] & ~(uint64_t)LOW) | (uint32_t)spill[row + i]);
    )
}

/* A nonzero remainder in the initial state is an error too. */
CLONES static void compare_chunk(const half_step *h, const void *f, int f_type, const void *z, const void *initial,
                                 int type, int64_t from, int64_t n, float floor, int32_t *worst) {
    memset(worst, 0, LANES * sizeof *worst);
    FOR_EACH_ROW(
        int64_t before[LANES];
        int32_t start[LANES];
        memcpy(before, state, lanes * sizeof *state);
        integers(h, initial, type, NULL, type, row, start, lanes);
        step_row(h, before, f, f_type, z, NULL, type, row, lanes, y, back(h));
        for (int64_t i = 0; i < lanes; i++) {
            float difference = (float)((double)y[i] - start[i]) * (float)unit(h) + (float)low(before[i]);
            int32_t bits = ratio_bits(difference, (float)high(state[i]) * (float)unit(h), floor);
            worst[i] = bits > worst[i] ? bits : worst[i];
        }
    )
}

/* Threads write here only after an overflow. */
INLINE void note(int *bad, int bad_here) {
    if (bad_here) {
#pragma omp atomic write
        *bad = 1;
    }
}

/* Arguments as in float64.c, and where the remainder is spilled, or NULL. Returns whether an f or a Y did not fit. */
API int revdeq_exact_relax(const half_step *h, int threads, const void *f, int f_type, const void *z, void *copy,
                           int copy_type, float *partial, int32_t *spill) {
    int bad = 0;
    FOR_EACH_CHUNK(threads, note(&bad, relax_chunk(h, f, f_type, z, copy, copy_type, from, n, spill,
                                                   partial ? partial + chunk * LANES : NULL,
                                                   partial ? partial + (chunks + chunk) * LANES : NULL)))
    return bad;
}

API void revdeq_exact_invert(const half_step *h, int threads, const void *f, int f_type, const void *z, void *copy,
                             int copy_type, void *adjoint, const void *vjp, const void *other, void *seed,
                             int seed_type, const int32_t *spill) {
    FOR_EACH_CHUNK(threads,
                   invert_chunk(h, f, f_type, z, copy, copy_type, from, n, spill);
                   update_adjoint(h, adjoint, vjp, other, copy_type, seed, seed_type, from, n))
}

API void revdeq_exact_compare(const half_step *h, int threads, const void *f, int f_type, const void *z,
                              const void *initial, int copy_type, void *adjoint, const void *vjp, const void *other,
                              void *seed, int seed_type, const float *floor, int32_t *worst) {
    FOR_EACH_CHUNK(threads,
                   compare_chunk(h, f, f_type, z, initial, copy_type, from, n, *floor, worst + chunk * LANES);
                   update_adjoint(h, adjoint, vjp, other, copy_type, seed, seed_type, from, n))
}
