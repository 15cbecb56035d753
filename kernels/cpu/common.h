/* What the half-steps of both states share: dtypes, chunks and threads, and the adjoint.
 *
 * Plain C, with neither Python's nor torch's headers: __init__.py loads the library with ctypes. It is compiled without
 * contraction (-ffp-contract=off): a fused multiply-add would change the bits. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef _MSC_VER
#define API __declspec(dllexport)
#define INLINE static __forceinline
#else
#define API __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#endif

/* The vector width is chosen when the library is loaded, which needs glibc's help (ifunc). Mark the functions below the
 * OpenMP regions: a region's body is outlined before the clones are made. GCC 11 knows features, but no levels. */
#if !defined(CLONES) && defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__)
#define CLONES __attribute__((target_clones("avx2", "default")))
#elif !defined(CLONES)
#define CLONES
#endif

enum dtype { F64, F32, BF16, F16 };

enum {
    LANES = 256, /* as in half_step.py */
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
#define CONSTANT(NAME, type, ...)                                    \
    switch (type) {                                                  \
    case F64: { const enum dtype NAME = F64; __VA_ARGS__; } break;   \
    case F32: { const enum dtype NAME = F32; __VA_ARGS__; } break;   \
    case BF16: { const enum dtype NAME = BF16; __VA_ARGS__; } break; \
    default: { const enum dtype NAME = F16; __VA_ARGS__; } break;    \
    }

/* A half-step and its tensors; __init__.py packs this structure. gamma, sign, p, d and bits are the exact state's. z is
 * NULL where gamma is 1. sums [2][chunks][LANES], spill, and the adjoint and its company are NULL unless they are asked
 * for. So are floor and worst [chunks][LANES], with which an inverse is compared with the initial state: then the copy
 * is the initial state. */
typedef struct {
    void *state;
    int64_t n;
    double a, b, c, gamma;
    int32_t rows, sign, p, d, bits, threads, inverse, f_type, copy_type, seed_type;
    void *f, *z, *copy, *sums;
    int32_t *spill;
    void *adjoint, *vjp, *other, *seed;
    const float *floor;
    int32_t *worst;
} call;

/* Chunk number `chunk` of `chunks` chunks: the elements [from, from + n) of the state. */
typedef struct { int64_t chunk, chunks, from, n; } part;

/* Runs a function for every chunk, and returns whether it returned 1 for any. A parallel region with one thread would
 * cost 0.7 us, as much as 2,000 elements. */
static int each_chunk(const call *c, int (*run)(const call *, part)) {
    const int64_t size = (int64_t)c->rows * LANES, n = c->n, chunks = (n + size - 1) / size;
    int any = 0;
    int64_t i;
#define RUN any |= run(c, (part){i, chunks, i * size, n - i * size < size ? n - i * size : size})
    if (n < SERIAL || c->threads < 2) {
        for (i = 0; i < chunks; i++)
            RUN;
        return any;
    }
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(c->threads) reduction(| : any)
#endif
    for (i = 0; i < chunks; i++)
        RUN;
    return any;
}

/* adjoint = a adjoint + b vjp + c other, in the adjoint's own precision, which the coefficients are rounded to. `other`
 * is read only if `mix`, which is a constant in every call: a condition in a loop would prevent vectorisation. */
#define UPDATE(REAL)                                                                                                 \
    for (int64_t i = 0; i < n; i++) {                                                                                \
        REAL next = (REAL)a * ((REAL *)adjoint)[i] + (REAL)b * (REAL)load(vjp, i, type);                             \
        ((REAL *)adjoint)[i] = mix ? next + (REAL)c * ((const REAL *)other)[i] : next;                               \
    }

INLINE void update_loop(double a, double b, double c, void *adjoint, const void *vjp, const void *other, int64_t n,
                        enum dtype type, const int mix) {
    if (type == F64)
        _Pragma("omp simd") UPDATE(double)
    else
        _Pragma("omp simd") UPDATE(float)
}

INLINE void copy_loop(const void *from, void *to, int64_t n, enum dtype type, enum dtype to_type) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++)
        store(to, i, to_type, load(from, i, type));
}

/* Updates the adjoint, if there is one, and copies it to the seed, if there is one. The adjoint is float64 if f reads
 * float64, and otherwise float32. */
CLONES static void update_adjoint(const call *c, part p) {
    if (!c->adjoint)
        return;
    const enum dtype wide = c->copy_type == F64 ? F64 : F32;
    void *adjoint = at(c->adjoint, p.from, wide);
    CONSTANT(C, c->copy_type, {
        const void *vjp = at(c->vjp, p.from, C);
        if (c->other)
            update_loop(c->a, c->b, c->c, adjoint, vjp, at(c->other, p.from, wide), p.n, C, 1);
        else
            update_loop(c->a, c->b, 0, adjoint, vjp, NULL, p.n, C, 0);
    })
    if (c->seed)
        CONSTANT(W, wide, CONSTANT(S, c->seed_type, copy_loop(adjoint, at(c->seed, p.from, S), p.n, W, S)))
}

/* The bits of |error| / max(|value|, floor), which are ordered like the numbers, with NaN as the largest. */
INLINE int32_t ratio_bits(float error, float value, float floor) {
    uint32_t size = bits_of(value) & 0x7FFFFFFFu, least = bits_of(floor);
    return (int32_t)(bits_of(error / float_of(size > least ? size : least)) & 0x7FFFFFFFu);
}
