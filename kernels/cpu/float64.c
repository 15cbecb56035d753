/* The half-steps of the float64 state on the CPU, one pass over memory each; reference.py is their specification. */
#include "common.h"

/* b f + c z, where z is what f read. It is read only if `mix`, which is a constant in every call. */
INLINE double moved_by(const void *f, const void *z, int64_t i, coefficients k, enum dtype f_type, enum dtype z_type,
                       const int mix) {
    double moved = k.b * load(f, i, f_type);
    return mix ? moved + k.c * load(z, i, z_type) : moved;
}

/* state = a state + b f + c z */
INLINE void relax_loop(double *state, const void *f, const void *z, void *copy, int64_t n, coefficients k,
                       enum dtype f_type, enum dtype copy_type, const int mix) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        double next = k.a * state[i] + moved_by(f, z, i, k, f_type, copy_type, mix);
        state[i] = next;
        store(copy, i, copy_type, next);
    }
}

/* The same, and each lane's sum over the rows of (next - state)^2 and of next^2. */
INLINE void relax_norms_loop(double *state, const void *f, const void *z, void *copy, int64_t n, coefficients k,
                             double *change, double *value, enum dtype f_type, enum dtype copy_type, const int mix) {
    memset(change, 0, LANES * sizeof *change);
    memset(value, 0, LANES * sizeof *value);
    for (int64_t row = 0; row < n; row += LANES) {
        int64_t lanes = n - row < LANES ? n - row : LANES;
#pragma omp simd
        for (int64_t lane = 0; lane < lanes; lane++) {
            int64_t i = row + lane;
            double next = k.a * state[i] + moved_by(f, z, i, k, f_type, copy_type, mix);
            double step = next - state[i];
            change[lane] += step * step;
            value[lane] += next * next;
            state[i] = next;
            store(copy, i, copy_type, next);
        }
    }
}

/* Calls a loop with constant dtypes. The first arguments of all loops are the same. */
#define WITH_TYPES(LOOP, Z, COPY, ...)                                                              \
    CONSTANT(F, f_type, CONSTANT(C, copy_type,                                                      \
        LOOP((double *)h->state + from, at(f, from, F), Z, at(COPY, from, C), n, h->step, __VA_ARGS__)))

CLONES static void relax_chunk(const half_step *h, const void *f, int f_type, const void *z, void *copy, int copy_type,
                               int64_t from, int64_t n, double *change, double *value) {
    if (change && z)
        WITH_TYPES(relax_norms_loop, at(z, from, C), copy, change, value, F, C, 1)
    else if (change)
        WITH_TYPES(relax_norms_loop, NULL, copy, change, value, F, C, 0)
    else if (z)
        WITH_TYPES(relax_loop, at(z, from, C), copy, F, C, 1)
    else
        WITH_TYPES(relax_loop, NULL, copy, F, C, 0)
}

/* state = (state - b f - c z) / a */
INLINE void invert_loop(double *state, const void *f, const void *z, void *copy, int64_t n, coefficients k,
                        enum dtype f_type, enum dtype copy_type, const int mix) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        double previous = (state[i] - moved_by(f, z, i, k, f_type, copy_type, mix)) / k.a;
        state[i] = previous;
        store(copy, i, copy_type, previous);
    }
}

CLONES static void invert_chunk(const half_step *h, const void *f, int f_type, const void *z, void *copy,
                                int copy_type, int64_t from, int64_t n) {
    if (z)
        WITH_TYPES(invert_loop, at(z, from, C), copy, F, C, 1)
    else
        WITH_TYPES(invert_loop, NULL, copy, F, C, 0)
}

/* Compares the inverse with the initial state, in copy's dtype, and changes neither. */
INLINE void compare_loop(const double *state, const void *f, const void *z, const void *initial, int64_t n,
                         coefficients k, float floor, int32_t *worst, enum dtype f_type, enum dtype copy_type,
                         const int mix) {
    memset(worst, 0, LANES * sizeof *worst);
    for (int64_t row = 0; row < n; row += LANES) {
        int64_t lanes = n - row < LANES ? n - row : LANES;
#pragma omp simd
        for (int64_t lane = 0; lane < lanes; lane++) {
            int64_t i = row + lane;
            double previous = (state[i] - moved_by(f, z, i, k, f_type, copy_type, mix)) / k.a;
            int32_t bits = ratio_bits((float)(previous - load(initial, i, copy_type)), (float)state[i], floor);
            worst[lane] = bits > worst[lane] ? bits : worst[lane];
        }
    }
}

CLONES static void compare_chunk(const half_step *h, const void *f, int f_type, const void *z, const void *initial,
                                 int copy_type, int64_t from, int64_t n, float floor, int32_t *worst) {
    if (z)
        WITH_TYPES(compare_loop, at(z, from, C), initial, floor, worst, F, C, 1)
    else
        WITH_TYPES(compare_loop, NULL, initial, floor, worst, F, C, 0)
}

/* z: what f read, or NULL where gamma is 1. partial: NULL, or [2][chunks][LANES], the sums of the change and the value */
API void revdeq_relax(const half_step *h, int threads, const void *f, int f_type, const void *z, void *copy,
                      int copy_type, double *partial) {
    FOR_EACH_CHUNK(threads, relax_chunk(h, f, f_type, z, copy, copy_type, from, n,
                                        partial ? partial + chunk * LANES : NULL,
                                        partial ? partial + (chunks + chunk) * LANES : NULL))
}

/* adjoint, vjp, other and seed may be NULL */
API void revdeq_invert(const half_step *h, int threads, const void *f, int f_type, const void *z, void *copy,
                       int copy_type, void *adjoint, const void *vjp, const void *other, void *seed, int seed_type) {
    FOR_EACH_CHUNK(threads,
                   invert_chunk(h, f, f_type, z, copy, copy_type, from, n);
                   update_adjoint(h, adjoint, vjp, other, copy_type, seed, seed_type, from, n))
}

/* worst: [chunks][LANES], the largest errors relative to the state or to the floor */
API void revdeq_compare(const half_step *h, int threads, const void *f, int f_type, const void *z, const void *initial,
                        int copy_type, void *adjoint, const void *vjp, const void *other, void *seed, int seed_type,
                        const float *floor, int32_t *worst) {
    FOR_EACH_CHUNK(threads,
                   compare_chunk(h, f, f_type, z, initial, copy_type, from, n, *floor, worst + chunk * LANES);
                   update_adjoint(h, adjoint, vjp, other, copy_type, seed, seed_type, from, n))
}
