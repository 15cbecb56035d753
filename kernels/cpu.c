/* The half-steps on the CPU, one pass over memory each; reference.py is their specification.
 *
 * Plain C, with neither Python's nor torch's headers: cpu.py loads the library with ctypes.
 * Compile without contraction (-ffp-contract=off): a fused multiply-add would change the bits.
 */
#include <stdint.h>
#include <string.h>

#ifdef _MSC_VER
#define API __declspec(dllexport)
#define INLINE static __forceinline
#else
#define API __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#endif

/* The vector width is chosen when the library is loaded. Function multiversioning needs the
 * loader's help (ifunc), which glibc has. It goes on the functions below the OpenMP regions:
 * a region's body is outlined before the clones are made and would stay at the baseline. */
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__)
#define CLONES __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

enum dtype { F64, F32, BF16, F16 };

enum {
    LANES = 256, /* as in reference.py */
    ROWS = 16,
    CHUNK = LANES * ROWS,
    SERIAL = 1 << 15, /* below this, waking a second thread costs more than it saves */
};

INLINE uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
INLINE float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

/* Written as selects, not branches, so that the loops around them are vectorised. */
INLINE float bfloat16_to_float(uint16_t h) { return float_of((uint32_t)h << 16); }

INLINE uint16_t float_to_bfloat16(float x) {
    uint32_t u = bits_of(x);
    uint32_t nearest_even = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
    return (uint16_t)((u & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : nearest_even);
}

INLINE float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, magnitude = (uint32_t)(h & 0x7FFFu) << 13;
    /* 2^112 moves the exponent bias from 15 to 127, and subnormals come out right. */
    uint32_t finite = bits_of(float_of(magnitude) * 0x1p112f);
    return float_of(sign | (magnitude >= 0x0F800000u ? magnitude | 0x7F800000u : finite));
}

INLINE uint16_t float_to_half(float x) {
    uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7FFFFFFFu;
    uint32_t normal = (magnitude - (112u << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
    /* Adding 1/2 aligns a subnormal half's last bit with that of the sum, which rounds it. */
    uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u;
    uint32_t special = magnitude > 0x7F800000u ? 0x7E00u : 0x7C00u;
    uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
    return (uint16_t)(sign | (magnitude >= 0x47800000u ? special : finite));
}

/* `type` is a constant wherever these are called, so each call is one conversion. */
INLINE double load(const void *p, int64_t i, enum dtype type) {
    switch (type) {
    case F64: return ((const double *)p)[i];
    case F32: return ((const float *)p)[i];
    case BF16: return bfloat16_to_float(((const uint16_t *)p)[i]);
    default: return half_to_float(((const uint16_t *)p)[i]);
    }
}

INLINE void store(void *p, int64_t i, enum dtype type, double x) {
    switch (type) {
    case F64: ((double *)p)[i] = x; break;
    case F32: ((float *)p)[i] = (float)x; break;
    case BF16: ((uint16_t *)p)[i] = float_to_bfloat16((float)x); break;
    default: ((uint16_t *)p)[i] = float_to_half((float)x); break;
    }
}

INLINE void *at(const void *p, int64_t i, enum dtype type) {
    return (char *)p + i * (type == F64 ? 8 : type == F32 ? 4 : 2);
}

/* Runs its last argument with `NAME` a compile-time constant equal to `type`. */
#define CONSTANT(NAME, type, ...)                             \
    switch (type) {                                           \
    case F64: { const enum dtype NAME = F64; __VA_ARGS__; } break;    \
    case F32: { const enum dtype NAME = F32; __VA_ARGS__; } break;    \
    case BF16: { const enum dtype NAME = BF16; __VA_ARGS__; } break;  \
    default: { const enum dtype NAME = F16; __VA_ARGS__; } break;     \
    }

/* One state, its copy in the dtype that f reads, and beta; bound once per solve. */
typedef struct {
    double *state;
    void *copy;
    int64_t n;
    double beta;
    int32_t copy_type;
} half_step;

/* state = a state + beta f */
INLINE void relax_loop(double *state, const void *f, void *copy, int64_t n, double beta,
                       enum dtype f_type, enum dtype copy_type) {
    const double a = 1 - beta;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        double next = a * state[i] + beta * load(f, i, f_type);
        state[i] = next;
        store(copy, i, copy_type, next);
    }
}

CLONES static void relax_chunk(const half_step *h, const void *f, int f_type, int64_t from, int64_t n) {
    CONSTANT(F, f_type, CONSTANT(C, h->copy_type,
        relax_loop(h->state + from, at(f, from, F), at(h->copy, from, C), n, h->beta, F, C)))
}

/* The same, and each lane's sum over the rows of (next - state)^2 and of next^2. */
INLINE void relax_norms_loop(double *state, const void *f, void *copy, int64_t n, double beta,
                             double *change, double *value, enum dtype f_type, enum dtype copy_type) {
    const double a = 1 - beta;
    memset(change, 0, LANES * sizeof *change);
    memset(value, 0, LANES * sizeof *value);
    for (int64_t row = 0; row < n; row += LANES) {
        int64_t lanes = n - row < LANES ? n - row : LANES;
#pragma omp simd
        for (int64_t lane = 0; lane < lanes; lane++) {
            int64_t i = row + lane;
            double next = a * state[i] + beta * load(f, i, f_type);
            double step = next - state[i];
            change[lane] += step * step;
            value[lane] += next * next;
            state[i] = next;
            store(copy, i, copy_type, next);
        }
    }
}

CLONES static void relax_norms_chunk(const half_step *h, const void *f, int f_type, int64_t from, int64_t n,
                                     double *change, double *value) {
    CONSTANT(F, f_type, CONSTANT(C, h->copy_type,
        relax_norms_loop(h->state + from, at(f, from, F), at(h->copy, from, C), n, h->beta, change, value, F, C)))
}

/* adjoint = a adjoint + beta vjp. The adjoint is float64 where f reads float64 and float32 everywhere else, and is
 * computed in its own precision. */
INLINE void update_adjoint(void *adjoint, const void *vjp, int64_t i, double a, double beta, enum dtype copy_type) {
    if (copy_type == F64)
        ((double *)adjoint)[i] = a * ((double *)adjoint)[i] + beta * ((const double *)vjp)[i];
    else
        ((float *)adjoint)[i] = (float)a * ((float *)adjoint)[i] + (float)beta * (float)load(vjp, i, copy_type);
}

/* state = (state - beta f) / a */
INLINE void invert_loop(double *state, const void *f, void *copy, int64_t n, double beta,
                        enum dtype f_type, enum dtype copy_type) {
    const double a = 1 - beta;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        double previous = (state[i] - beta * load(f, i, f_type)) / a;
        state[i] = previous;
        store(copy, i, copy_type, previous);
    }
}

/* The same, and the adjoint. */
INLINE void invert_adjoint_loop(double *state, const void *f, void *copy, void *adjoint, const void *vjp, int64_t n,
                                double beta, enum dtype f_type, enum dtype copy_type) {
    const double a = 1 - beta;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        double previous = (state[i] - beta * load(f, i, f_type)) / a;
        state[i] = previous;
        store(copy, i, copy_type, previous);
        update_adjoint(adjoint, vjp, i, a, beta, copy_type);
    }
}

CLONES static void invert_chunk(const half_step *h, const void *f, int f_type, int64_t from, int64_t n,
                                void *adjoint, const void *vjp) {
    if (adjoint)
        CONSTANT(F, f_type, CONSTANT(C, h->copy_type,
            invert_adjoint_loop(h->state + from, at(f, from, F), at(h->copy, from, C),
                                at(adjoint, from, C == F64 ? F64 : F32), at(vjp, from, C), n, h->beta, F, C)))
    else
        CONSTANT(F, f_type, CONSTANT(C, h->copy_type,
            invert_loop(h->state + from, at(f, from, F), at(h->copy, from, C), n, h->beta, F, C)))
}

/* Compares the inverse with the initial state, in copy's dtype, and stores neither; see reference.py. */
INLINE void invert_compare_loop(const double *state, const void *f, const void *initial, void *adjoint,
                                const void *vjp, int64_t n, double beta, int32_t *error, int32_t *value,
                                enum dtype f_type, enum dtype copy_type) {
    const double a = 1 - beta;
    memset(error, 0, LANES * sizeof *error);
    memset(value, 0, LANES * sizeof *value);
    for (int64_t row = 0; row < n; row += LANES) {
        int64_t lanes = n - row < LANES ? n - row : LANES;
#pragma omp simd
        for (int64_t lane = 0; lane < lanes; lane++) {
            int64_t i = row + lane;
            double difference = (state[i] - beta * load(f, i, f_type)) / a - load(initial, i, copy_type);
            int32_t error_bits = (int32_t)(bits_of((float)difference) & 0x7FFFFFFFu);
            int32_t value_bits = (int32_t)(bits_of((float)state[i]) & 0x7FFFFFFFu);
            error[lane] = error_bits > error[lane] ? error_bits : error[lane];
            value[lane] = value_bits > value[lane] ? value_bits : value[lane];
            if (adjoint)
                update_adjoint(adjoint, vjp, i, a, beta, copy_type);
        }
    }
}

CLONES static void invert_compare_chunk(const half_step *h, const void *f, int f_type, int64_t from, int64_t n,
                                        const void *initial, void *adjoint, const void *vjp, int32_t *error,
                                        int32_t *value) {
    if (adjoint)
        CONSTANT(F, f_type, CONSTANT(C, h->copy_type,
            invert_compare_loop(h->state + from, at(f, from, F), at(initial, from, C),
                                at(adjoint, from, C == F64 ? F64 : F32), at(vjp, from, C), n, h->beta, error, value,
                                F, C)))
    else
        CONSTANT(F, f_type, CONSTANT(C, h->copy_type,
            invert_compare_loop(h->state + from, at(f, from, F), at(initial, from, C), NULL, NULL, n, h->beta, error,
                                value, F, C)))
}

/* Calls CALL for every chunk [from, from + n) of the h->n elements. A parallel region with one thread would
 * still cost 0.7 us, as much as 2,000 elements. */
#define FOR_EACH_CHUNK(threads, CALL)                                                \
    const int64_t chunks = (h->n + CHUNK - 1) / CHUNK;                               \
    int64_t chunk;                                                                   \
    if (threads < 2 || h->n < SERIAL)                                                \
        for (chunk = 0; chunk < chunks; chunk++) ONE_CHUNK(CALL)                     \
    else {                                                                           \
        _Pragma("omp parallel for schedule(static) num_threads(threads)")            \
        for (chunk = 0; chunk < chunks; chunk++) ONE_CHUNK(CALL)                     \
    }

#define ONE_CHUNK(CALL)                                                              \
    {                                                                                \
        const int64_t from = chunk * CHUNK, n = h->n - from < CHUNK ? h->n - from : CHUNK; \
        CALL;                                                                        \
    }

API void revdeq_relax(const half_step *h, const void *f, int f_type, int threads) {
    FOR_EACH_CHUNK(threads, relax_chunk(h, f, f_type, from, n))
}

/* partial: [2][chunks][LANES], the sums for the change and for the value */
API void revdeq_relax_norms(const half_step *h, const void *f, int f_type, int threads, double *partial) {
    FOR_EACH_CHUNK(threads, relax_norms_chunk(h, f, f_type, from, n, partial + chunk * LANES,
                                              partial + (chunks + chunk) * LANES))
}

/* adjoint and vjp may be NULL: then only the state is inverted */
API void revdeq_invert(const half_step *h, const void *f, int f_type, int threads, void *adjoint, const void *vjp) {
    FOR_EACH_CHUNK(threads, invert_chunk(h, f, f_type, from, n, adjoint, vjp))
}

/* partial: [2][chunks][LANES], the maxima of the error and of the state; adjoint and vjp may be NULL */
API void revdeq_invert_compare(const half_step *h, const void *f, int f_type, int threads, const void *initial,
                               void *adjoint, const void *vjp, int32_t *partial) {
    FOR_EACH_CHUNK(threads, invert_compare_chunk(h, f, f_type, from, n, initial, adjoint, vjp,
                                                 partial + chunk * LANES, partial + (chunks + chunk) * LANES))
}

/* The integer state of exact.py. A half-step and its inverse are one function, with p and d exchanged:
 *
 *     e = R mod from, R = floor(R / from)
 *     T = sign (from Y + e) + weight F
 *     Y = floor(T / to), R = R to + (T mod to)
 *
 * It runs on a row of LANES elements at a time, which stays in the first-level cache while f is converted before and
 * Y after it: only these conversions know dtypes. */
typedef struct {
    int64_t *state;
    void *copy;
    int64_t n;
    double a, beta;
    int32_t sign, p, d, fraction_bits, copy_type;
} exact_half_step;

typedef struct {
    int32_t from, to, sign, weight;
} radix;

INLINE radix there(const exact_half_step *h) { return (radix){h->p, h->d, h->sign, h->d - h->sign * h->p}; }
INLINE radix back(const exact_half_step *h) { return (radix){h->d, h->p, h->sign, h->p - h->sign * h->d}; }
INLINE double unit(const exact_half_step *h) { return 1.0 / (double)((int64_t)1 << h->fraction_bits); }

INLINE uint64_t word_of(double x) { uint64_t u; memcpy(&u, &x, 8); return u; }
INLINE double double_of(uint64_t u) { double x; memcpy(&x, &u, 8); return x; }

/* A double plus ROUND is rounded to an integer, whose two's complement stands in the low bits. */
#define ROUND 0x1.8p52
#define LOW 0xFFFFFFFFu

/* floor(x / n) = round(x / n + OFFSET(n)), for integers |x| < 2^42 and n <= 64 never near a tie. */
#define OFFSET(n) ((0.5 - (n) / 2.0) / (n))

/* The halves of a word as doubles, without leaving 64-bit lanes: the low bits of 2^52 + u are u. */
INLINE double high(int64_t word) {
    return double_of((uint64_t)word >> 32 ^ (word_of(0x1p52) | 0x80000000u)) - (0x1p52 + 0x1p31);
}
INLINE double low(int64_t word) { return double_of(((uint64_t)word & LOW) | word_of(0x1p52)) - 0x1p52; }

/* One row, by doubles, which hold all of these integers exactly and are vectorised everywhere. Stores Y also in y;
 * returns whether a Y did not fit into 32 bits, as only happens where sign < 0. */
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

/* The same with AVX2's product of the low halves of 64-bit lanes, which takes half the time and which no compiler
 * finds by itself. n is a multiple of 8, and the flags are constant where this is called. With `floats`, f and copy
 * are float32 and converted on the way, in float32: an f that does not fit becomes -2^31, which is not an f. */
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

/* Chooses the flags. */
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

/* f in units of 2^-G, rounded to the nearest even, or 0 where that is not a number of 32 bits; returns whether that
 * happened. */
INLINE int integers_loop(const void *f, int32_t *number, int64_t n, double scale, enum dtype type) {
    int bad = 0;
#pragma omp simd reduction(| : bad)
    for (int64_t i = 0; i < n; i++) {
        if (type == F64) {
            double whole = __builtin_rint(((const double *)f)[i] * scale);
            int fits = __builtin_fabs(whole) < 0x1p31;
            number[i] = (int32_t)(fits ? whole : 0);
            bad |= !fits;
        } else {
            float whole = __builtin_rintf((float)load(f, i, type) * (float)scale);
            int fits = __builtin_fabsf(whole) < 0x1p31f;
            number[i] = (int32_t)(fits ? whole : 0);
            bad |= !fits;
        }
    }
    return bad;
}

INLINE void decode_loop(const int32_t *y, void *copy, int64_t n, double unit, enum dtype type) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++)
        store(copy, i, type, type == F64 ? y[i] * unit : (float)y[i] * (float)unit);
}

INLINE void update_adjoint_loop(void *adjoint, const void *vjp, int64_t n, double a, double beta, enum dtype type) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++)
        update_adjoint(adjoint, vjp, i, a, beta, type);
}

INLINE int integers(const void *f, int64_t from, int32_t *number, int64_t n, double scale, int type) {
    int bad = 0;
    CONSTANT(F, type, bad = integers_loop(at(f, from, F), number, n, scale, F))
    return bad;
}

/* A row: f is converted, stepped with, and Y is left in y and decoded into copy, which may be NULL. Returns whether an f or
 * a Y did not fit. */
INLINE int step_row(const exact_half_step *h, int64_t *state, const void *f, int f_type, int64_t row, int64_t lanes,
                    int32_t *y, void *copy, radix radix) {
    int32_t number[LANES];
    int64_t eights = EIGHTS(lanes), rest = lanes;
    int bad = 0;
    if (eights && f_type == F32 && (!copy || h->copy_type == F32)) {
        bad = step_eights_of_floats(state, (const float *)f + row, y, copy ? (float *)copy + row : NULL, eights, radix,
                                    (float)unit(h));
        if (eights == lanes)
            return bad;
        state += eights, y += eights, row += eights, rest = lanes - eights, eights = 0;
    }
    bad |= integers(f, row, number, rest, 1 / unit(h), f_type);
    if (eights)
        bad |= step_eights(state, number, y, eights, radix);
    if (eights < rest)
        bad |= step_by_doubles(state + eights, number + eights, y + eights, rest - eights, radix);
    if (copy)
        CONSTANT(C, h->copy_type, decode_loop(y, at(copy, row, C), rest, unit(h), C))
    return bad;
}

#define FOR_EACH_ROW(...)                                                                \
    for (int64_t row = from, end = from + n; row < end; row += LANES) {                  \
        const int64_t lanes = end - row < LANES ? end - row : LANES;                     \
        int32_t y[LANES];                                                                \
        __VA_ARGS__                                                                      \
    }

/* Returns whether an f or a Y did not fit. spill may be NULL, as may change with value. */
CLONES static int exact_relax_chunk(const exact_half_step *h, const void *f, int f_type, int64_t from, int64_t n,
                                    int32_t *spill, float *change, float *value) {
    int bad = 0;
    if (change) {
        memset(change, 0, LANES * sizeof *change);
        memset(value, 0, LANES * sizeof *value);
    }
    FOR_EACH_ROW(
        int64_t *state = h->state + row, before[LANES];
        if (change)
            memcpy(before, state, lanes * sizeof *state);
        if (spill)
            for (int64_t i = 0; i < lanes; i++) {
                spill[row + i] = (int32_t)(uint32_t)state[i];
                state[i] = (int64_t)((uint64_t)state[i] & ~(uint64_t)LOW);
            }
        bad |= step_row(h, state, f, f_type, row, lanes, y, h->copy, there(h));
        if (change)
            for (int64_t i = 0; i < lanes; i++) {
                float moved = (float)(y[i] - high(before[i])) * (float)unit(h), size = (float)y[i] * (float)unit(h);
                change[i] += moved * moved;
                value[i] += size * size;
            }
    )
    return bad;
}

/* adjoint and vjp may be NULL. With a spill, the remainder before the half-step comes back from there. */
CLONES static void exact_invert_chunk(const exact_half_step *h, const void *f, int f_type, int64_t from, int64_t n,
                                      void *adjoint, const void *vjp, const int32_t *spill) {
    FOR_EACH_ROW(
        int64_t *state = h->state + row;
        step_row(h, state, f, f_type, row, lanes, y, h->copy, back(h));
        if (spill)
            for (int64_t i = 0; i < lanes; i++)
                state[i] = (int64_t)(((uint64_t)state[i] & ~(uint64_t)LOW) | (uint32_t)spill[row + i]);
        if (adjoint)
            CONSTANT(C, h->copy_type, update_adjoint_loop(at(adjoint, row, C == F64 ? F64 : F32), at(vjp, row, C),
                                                          lanes, h->a, h->beta, C))
    )
}

/* Compares as invert_compare_loop does. A remainder that is not 0 at the beginning is an error too. */
CLONES static void exact_compare_chunk(const exact_half_step *h, const void *f, int f_type, int64_t from, int64_t n,
                                       const void *initial, void *adjoint, const void *vjp, int32_t *error,
                                       int32_t *value) {
    memset(error, 0, LANES * sizeof *error);
    memset(value, 0, LANES * sizeof *value);
    FOR_EACH_ROW(
        int64_t state[LANES];
        int32_t start[LANES];
        memcpy(state, h->state + row, lanes * sizeof *state);
        integers(initial, row, start, lanes, 1 / unit(h), h->copy_type);
        step_row(h, state, f, f_type, row, lanes, y, NULL, back(h));
        for (int64_t i = 0; i < lanes; i++) {
            float difference = (float)((double)y[i] - start[i]) * (float)unit(h) + (float)low(state[i]);
            float size = (float)high(h->state[row + i]) * (float)unit(h);
            int32_t error_bits = (int32_t)(bits_of(difference) & 0x7FFFFFFFu);
            int32_t value_bits = (int32_t)(bits_of(size) & 0x7FFFFFFFu);
            error[i] = error_bits > error[i] ? error_bits : error[i];
            value[i] = value_bits > value[i] ? value_bits : value[i];
        }
        if (adjoint)
            CONSTANT(C, h->copy_type, update_adjoint_loop(at(adjoint, row, C == F64 ? F64 : F32), at(vjp, row, C),
                                                          lanes, h->a, h->beta, C))
    )
}

/* Threads meet here only when something is wrong. */
INLINE void note(int *bad, int bad_here) {
    if (bad_here) {
#pragma omp atomic write
        *bad = 1;
    }
}

API int revdeq_exact_relax(const exact_half_step *h, const void *f, int f_type, int threads, int32_t *spill) {
    int bad = 0;
    FOR_EACH_CHUNK(threads, note(&bad, exact_relax_chunk(h, f, f_type, from, n, spill, NULL, NULL)))
    return bad;
}

/* partial: [2][chunks][LANES] */
API int revdeq_exact_relax_norms(const exact_half_step *h, const void *f, int f_type, int threads, int32_t *spill,
                                 float *partial) {
    int bad = 0;
    FOR_EACH_CHUNK(threads, note(&bad, exact_relax_chunk(h, f, f_type, from, n, spill, partial + chunk * LANES,
                                                         partial + (chunks + chunk) * LANES)))
    return bad;
}

API void revdeq_exact_invert(const exact_half_step *h, const void *f, int f_type, int threads, void *adjoint,
                             const void *vjp, const int32_t *spill) {
    FOR_EACH_CHUNK(threads, exact_invert_chunk(h, f, f_type, from, n, adjoint, vjp, spill))
}

API void revdeq_exact_invert_compare(const exact_half_step *h, const void *f, int f_type, int threads,
                                     const void *initial, void *adjoint, const void *vjp, int32_t *partial) {
    FOR_EACH_CHUNK(threads, exact_compare_chunk(h, f, f_type, from, n, initial, adjoint, vjp, partial + chunk * LANES,
                                                partial + (chunks + chunk) * LANES))
}
