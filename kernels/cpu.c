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

/* The same, and adjoint = a adjoint + beta vjp. The adjoint is float64 where f reads float64 and
 * float32 everywhere else, and is computed in its own precision. */
INLINE void invert_adjoint_loop(double *state, const void *f, void *copy, void *adjoint, const void *vjp, int64_t n,
                                double beta, enum dtype f_type, enum dtype copy_type) {
    const double a = 1 - beta;
    const float a32 = (float)a, beta32 = (float)beta;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        double previous = (state[i] - beta * load(f, i, f_type)) / a;
        state[i] = previous;
        store(copy, i, copy_type, previous);
        if (copy_type == F64)
            ((double *)adjoint)[i] = a * ((double *)adjoint)[i] + beta * ((const double *)vjp)[i];
        else
            ((float *)adjoint)[i] = a32 * ((float *)adjoint)[i] + beta32 * (float)load(vjp, i, copy_type);
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
    const float a32 = (float)a, beta32 = (float)beta;
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
            if (!adjoint)
                continue;
            if (copy_type == F64)
                ((double *)adjoint)[i] = a * ((double *)adjoint)[i] + beta * ((const double *)vjp)[i];
            else
                ((float *)adjoint)[i] = a32 * ((float *)adjoint)[i] + beta32 * (float)load(vjp, i, copy_type);
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

/* The integer state of exact.py. Doubles hold all of its integers exactly (|T| < 2^39), so that the loops are
 * vectorised like those above. */
typedef struct {
    int64_t *state;
    void *copy;
    int64_t n;
    double a, beta, sign, p, d, weight, scale;
    int32_t copy_type;
} exact_half_step;

/* floor(x / d) for integers |x| < 2^46 and d <= 64: x + 1/2 is never closer to a multiple of d than 1/2. */
INLINE double floor_divide(double x, double inverse) { return __builtin_floor((x + 0.5) * inverse); }

INLINE uint64_t word_of(double x) { uint64_t u; memcpy(&u, &x, 8); return u; }
INLINE double double_of(uint64_t u) { double x; memcpy(&x, &u, 8); return x; }

/* The two halves of a word as doubles and back, without leaving 64-bit lanes: the low bits of 2^52 + u are u. */
#define BITS_OF_2_52 0x4330000000000000u
INLINE double high(int64_t word) {
    return double_of(((uint64_t)word >> 32 ^ 0x80000000u) | BITS_OF_2_52) - (0x1p52 + 0x1p31);
}
INLINE double low(int64_t word) { return double_of(((uint64_t)word & 0xFFFFFFFFu) | BITS_OF_2_52) - 0x1p52; }
INLINE int64_t packed(double y, double r) {
    return (int64_t)((word_of(y + (0x1p52 + 0x1p31)) ^ 0x80000000u) << 32 | (word_of(r + 0x1p52) & 0xFFFFFFFFu));
}

/* f in units of 2^-G, or 0 if that is not a number of 32 bits */
INLINE double to_integer(double f, double scale) {
    double scaled = f * scale;
    return __builtin_fabs(scaled) < 0x1p31 ? __builtin_rint(scaled) : 0;
}

INLINE void store_decoded(void *copy, int64_t i, enum dtype type, double y, double unit) {
    if (type == F64)
        ((double *)copy)[i] = y * unit;
    else
        store(copy, i, type, (float)y * (float)unit);
}

/* Threads meet here only when something is wrong. */
INLINE void bad_chunk(int64_t *bad, int64_t bad_here) {
    if (bad_here) {
#pragma omp atomic write
        *bad = 1;
    }
}

/* `one` says that p = 1, which saves a third of the work. With change and value (one row of lanes at a time), adds
 * their squares. Returns whether an f or a state did not fit into 32 bits. */
INLINE int64_t exact_relax_loop(const exact_half_step *h, int64_t *state, const void *f, void *copy, int64_t n,
                                float *change, float *value, int one, enum dtype f_type, enum dtype copy_type) {
    const double sign = h->sign, p = one ? 1 : h->p, d = h->d, weight = h->weight, scale = h->scale, unit = 1 / scale;
    const double inverse_p = 1 / p, inverse_d = 1 / d;
    int64_t bad = 0;
#pragma omp simd reduction(| : bad)
    for (int64_t i = 0; i < n; i++) {
        double y = high(state[i]), r = low(state[i]), number = load(f, i, f_type);
        double rest = one ? r : floor_divide(r, inverse_p), e = one ? 0 : r - rest * p;
        double t = sign * (p * y + e) + weight * to_integer(number, scale);
        double next = floor_divide(t, inverse_d);
        bad |= !(__builtin_fabs(number * scale) < 0x1p31) | !(__builtin_fabs(next + 0.5) < 0x1p31);
        state[i] = packed(next, rest * d + (t - next * d));
        store_decoded(copy, i, copy_type, next, unit);
        if (change) {
            float step = (float)(next - y) * (float)unit, size = (float)next * (float)unit;
            change[i] += step * step;
            value[i] += size * size;
        }
    }
    return bad;
}

INLINE int64_t exact_relax_rows(const exact_half_step *h, int64_t *state, const void *f, void *copy, int64_t n,
                                float *change, float *value, int one, enum dtype f_type, enum dtype copy_type) {
    int64_t bad = 0;
    memset(change, 0, LANES * sizeof *change);
    memset(value, 0, LANES * sizeof *value);
    for (int64_t i = 0; i < n; i += LANES)
        bad |= exact_relax_loop(h, state + i, at(f, i, f_type), at(copy, i, copy_type), n - i < LANES ? n - i : LANES,
                                change, value, one, f_type, copy_type);
    return bad;
}

CLONES static int64_t exact_relax_chunk(const exact_half_step *h, const void *f, int f_type, int64_t from, int64_t n,
                                        int32_t *spill) {
    int64_t *state = h->state + from, bad = 0;
    if (spill)
        for (int64_t i = 0; i < n; i++) {
            spill[from + i] = (int32_t)(uint32_t)state[i];
            state[i] = (int64_t)((uint64_t)state[i] & 0xFFFFFFFF00000000u);
        }
    if (h->p == 1)
        CONSTANT(F, f_type, CONSTANT(C, h->copy_type,
            bad = exact_relax_loop(h, state, at(f, from, F), at(h->copy, from, C), n, NULL, NULL, 1, F, C)))
    else
        CONSTANT(F, f_type, CONSTANT(C, h->copy_type,
            bad = exact_relax_loop(h, state, at(f, from, F), at(h->copy, from, C), n, NULL, NULL, 0, F, C)))
    return bad;
}

CLONES static int64_t exact_relax_norms_chunk(const exact_half_step *h, const void *f, int f_type, int64_t from,
                                              int64_t n, int32_t *spill, float *change, float *value) {
    int64_t *state = h->state + from, bad = 0;
    if (spill)
        for (int64_t i = 0; i < n; i++) {
            spill[from + i] = (int32_t)(uint32_t)state[i];
            state[i] = (int64_t)((uint64_t)state[i] & 0xFFFFFFFF00000000u);
        }
    if (h->p == 1)
        CONSTANT(F, f_type, CONSTANT(C, h->copy_type,
            bad = exact_relax_rows(h, state, at(f, from, F), at(h->copy, from, C), n, change, value, 1, F, C)))
    else
        CONSTANT(F, f_type, CONSTANT(C, h->copy_type,
            bad = exact_relax_rows(h, state, at(f, from, F), at(h->copy, from, C), n, change, value, 0, F, C)))
    return bad;
}

/* The adjoint is updated as in invert_adjoint_loop. */
INLINE void exact_invert_loop(const exact_half_step *h, int64_t *state, const void *f, void *copy, void *adjoint,
                              const void *vjp, int64_t n, int one, enum dtype f_type, enum dtype copy_type) {
    const double sign = h->sign, p = one ? 1 : h->p, d = h->d, weight = h->weight, scale = h->scale, unit = 1 / scale;
    const double inverse_p = 1 / p, inverse_d = 1 / d;
    const float a32 = (float)h->a, beta32 = (float)h->beta;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        double y = high(state[i]), r = low(state[i]);
        double rest = floor_divide(r, inverse_d);
        double u = sign * (y * d + (r - rest * d) - weight * to_integer(load(f, i, f_type), scale));
        double previous = one ? u : floor_divide(u, inverse_p);
        state[i] = packed(previous, one ? rest : rest * p + (u - previous * p));
        store_decoded(copy, i, copy_type, previous, unit);
        if (!adjoint)
            continue;
        if (copy_type == F64)
            ((double *)adjoint)[i] = h->a * ((double *)adjoint)[i] + h->beta * ((const double *)vjp)[i];
        else
            ((float *)adjoint)[i] = a32 * ((float *)adjoint)[i] + beta32 * (float)load(vjp, i, copy_type);
    }
}

#define EXACT_INVERT(ONE, ADJOINT, VJP)                                                                  \
    CONSTANT(F, f_type, CONSTANT(C, h->copy_type,                                                        \
        exact_invert_loop(h, state, at(f, from, F), at(h->copy, from, C), ADJOINT, VJP, n, ONE, F, C)))

CLONES static void exact_invert_chunk(const exact_half_step *h, const void *f, int f_type, int64_t from, int64_t n,
                                      void *adjoint, const void *vjp, const int32_t *spill) {
    int64_t *state = h->state + from;
    if (adjoint && h->p == 1)
        EXACT_INVERT(1, at(adjoint, from, C == F64 ? F64 : F32), at(vjp, from, C))
    else if (adjoint)
        EXACT_INVERT(0, at(adjoint, from, C == F64 ? F64 : F32), at(vjp, from, C))
    else
        EXACT_INVERT(0, NULL, NULL)
    if (spill) /* before that half-step the remainder was put aside; it comes back from there */
        for (int64_t i = 0; i < n; i++)
            state[i] = (int64_t)(((uint64_t)state[i] & 0xFFFFFFFF00000000u) | (uint32_t)spill[from + i]);
}

/* Compares as invert_compare_loop does. A remainder that is not 0 at the beginning is an error too. */
INLINE void exact_compare_loop(const exact_half_step *h, const int64_t *state, const void *f, const void *initial,
                               void *adjoint, const void *vjp, int64_t n, int32_t *error, int32_t *value,
                               enum dtype f_type, enum dtype copy_type) {
    const double sign = h->sign, p = h->p, d = h->d, weight = h->weight, scale = h->scale;
    const double inverse_p = 1 / p, inverse_d = 1 / d;
    const float a32 = (float)h->a, beta32 = (float)h->beta, unit = (float)(1 / scale);
    memset(error, 0, LANES * sizeof *error);
    memset(value, 0, LANES * sizeof *value);
    for (int64_t row = 0; row < n; row += LANES) {
        int64_t lanes = n - row < LANES ? n - row : LANES;
#pragma omp simd
        for (int64_t lane = 0; lane < lanes; lane++) {
            int64_t i = row + lane;
            double y = high(state[i]), r = low(state[i]), rest = floor_divide(r, inverse_d);
            double u = sign * (y * d + (r - rest * d) - weight * to_integer(load(f, i, f_type), scale));
            double previous = floor_divide(u, inverse_p);
            float difference = (float)(previous - to_integer(load(initial, i, copy_type), scale)) * unit +
                               (float)(rest * p + (u - previous * p));
            int32_t error_bits = (int32_t)(bits_of(difference) & 0x7FFFFFFFu);
            int32_t value_bits = (int32_t)(bits_of((float)y * unit) & 0x7FFFFFFFu);
            error[lane] = error_bits > error[lane] ? error_bits : error[lane];
            value[lane] = value_bits > value[lane] ? value_bits : value[lane];
            if (!adjoint)
                continue;
            if (copy_type == F64)
                ((double *)adjoint)[i] = h->a * ((double *)adjoint)[i] + h->beta * ((const double *)vjp)[i];
            else
                ((float *)adjoint)[i] = a32 * ((float *)adjoint)[i] + beta32 * (float)load(vjp, i, copy_type);
        }
    }
}

CLONES static void exact_compare_chunk(const exact_half_step *h, const void *f, int f_type, int64_t from, int64_t n,
                                       const void *initial, void *adjoint, const void *vjp, int32_t *error,
                                       int32_t *value) {
    const int64_t *state = h->state + from;
    if (adjoint)
        CONSTANT(F, f_type, CONSTANT(C, h->copy_type,
            exact_compare_loop(h, state, at(f, from, F), at(initial, from, C), at(adjoint, from, C == F64 ? F64 : F32),
                               at(vjp, from, C), n, error, value, F, C)))
    else
        CONSTANT(F, f_type, CONSTANT(C, h->copy_type,
            exact_compare_loop(h, state, at(f, from, F), at(initial, from, C), NULL, NULL, n, error, value, F, C)))
}

API void revdeq_exact_invert_compare(const exact_half_step *h, const void *f, int f_type, int threads,
                                     const void *initial, void *adjoint, const void *vjp, int32_t *partial) {
    FOR_EACH_CHUNK(threads, exact_compare_chunk(h, f, f_type, from, n, initial, adjoint, vjp, partial + chunk * LANES,
                                                partial + (chunks + chunk) * LANES))
}

/* Return whether an f or a state did not fit into 32 bits. spill may be NULL, as may adjoint with vjp. */
API int revdeq_exact_relax(const exact_half_step *h, const void *f, int f_type, int threads, int32_t *spill) {
    int64_t bad = 0;
    FOR_EACH_CHUNK(threads, bad_chunk(&bad, exact_relax_chunk(h, f, f_type, from, n, spill)))
    return bad != 0;
}

/* partial: [2][chunks][LANES] */
API int revdeq_exact_relax_norms(const exact_half_step *h, const void *f, int f_type, int threads, int32_t *spill,
                                 float *partial) {
    int64_t bad = 0;
    FOR_EACH_CHUNK(threads, bad_chunk(&bad, exact_relax_norms_chunk(h, f, f_type, from, n, spill,
                                                                    partial + chunk * LANES,
                                                                    partial + (chunks + chunk) * LANES)))
    return bad != 0;
}

API void revdeq_exact_invert(const exact_half_step *h, const void *f, int f_type, int threads, void *adjoint,
                             const void *vjp, const int32_t *spill) {
    FOR_EACH_CHUNK(threads, exact_invert_chunk(h, f, f_type, from, n, adjoint, vjp, spill))
}
