/* The half-steps of the float64 state on the CPU, one pass over memory each; reference.py is their specification. */
#include "common.h"

/* cpu.py compares these with its own when it loads the library. */
API const int32_t revdeq_lanes = LANES, revdeq_rows = ROWS, revdeq_has_examples = 1;

/* One state, its copy in the dtype that f reads, and the coefficients of the current step. */
typedef struct {
    double *state;
    void *copy;
    int64_t n;
    coefficients step, adjoint;
    int32_t copy_type;
    examples each;
} half_step;

/* Copies a frozen state to the copy. */
CLONES static void copy_chunk(const half_step *h, int64_t from, int64_t n) {
    CONSTANT(C, h->copy_type, seed_loop(h->state + from, at(h->copy, from, C), n, F64, C))
}

/* b f + c z, where z is what f read. It is read only if `mix`, which is a constant in every call. */
INLINE double moved_by(const void *f, const void *read, int64_t i, coefficients k, enum dtype f_type,
                       enum dtype copy_type, const int mix) {
    double moved = k.b * load(f, i, f_type);
    return mix ? moved + k.c * load(read, i, copy_type) : moved;
}

/* state = a state + b f + c z */
INLINE void relax_loop(double *state, const void *f, const void *read, void *copy, int64_t n, coefficients k,
                       enum dtype f_type, enum dtype copy_type, const int mix) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        double next = k.a * state[i] + moved_by(f, read, i, k, f_type, copy_type, mix);
        state[i] = next;
        store(copy, i, copy_type, next);
    }
}

CLONES static void relax_chunk(const half_step *h, const void *f, int f_type, const void *read, int64_t from,
                               int64_t n, int left) {
    if (left < 1)
        copy_chunk(h, from, n);
    else if (read)
        CONSTANT(F, f_type, CONSTANT(C, h->copy_type,
            relax_loop(h->state + from, at(f, from, F), at(read, from, C), at(h->copy, from, C), n, h->step, F, C,
                       1)))
    else
        CONSTANT(F, f_type, CONSTANT(C, h->copy_type,
            relax_loop(h->state + from, at(f, from, F), NULL, at(h->copy, from, C), n, h->step, F, C, 0)))
}

/* The same, and each lane's sum over the rows of (next - state)^2 and of next^2. */
INLINE void relax_norms_loop(double *state, const void *f, const void *read, void *copy, int64_t n, coefficients k,
                             double *change, double *value, enum dtype f_type, enum dtype copy_type, const int mix) {
    memset(change, 0, LANES * sizeof *change);
    memset(value, 0, LANES * sizeof *value);
    for (int64_t row = 0; row < n; row += LANES) {
        int64_t lanes = n - row < LANES ? n - row : LANES;
#pragma omp simd
        for (int64_t lane = 0; lane < lanes; lane++) {
            int64_t i = row + lane;
            double next = k.a * state[i] + moved_by(f, read, i, k, f_type, copy_type, mix);
            double step = next - state[i];
            change[lane] += step * step;
            value[lane] += next * next;
            state[i] = next;
            store(copy, i, copy_type, next);
        }
    }
}

CLONES static void relax_norms_chunk(const half_step *h, const void *f, int f_type, const void *read, int64_t from,
                                     int64_t n, double *change, double *value, int left) {
    if (left < 1) {
        copy_chunk(h, from, n);
        memset(change, 0, LANES * sizeof *change);
        memset(value, 0, LANES * sizeof *value);
    } else if (read)
        CONSTANT(F, f_type, CONSTANT(C, h->copy_type,
            relax_norms_loop(h->state + from, at(f, from, F), at(read, from, C), at(h->copy, from, C), n, h->step,
                             change, value, F, C, 1)))
    else
        CONSTANT(F, f_type, CONSTANT(C, h->copy_type,
            relax_norms_loop(h->state + from, at(f, from, F), NULL, at(h->copy, from, C), n, h->step, change, value,
                             F, C, 0)))
}

/* state = (state - b f - c z) / a. The copy holds z, if that is needed, until it is overwritten with the state.
 * `adjoint` may be NULL. */
INLINE void invert_loop(double *state, const void *f, void *copy, void *adjoint, const void *vjp, const void *other,
                        int64_t n, coefficients k, coefficients adjoint_k, const int mix, const int mix_adjoint,
                        enum dtype f_type, enum dtype copy_type) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        double previous = (state[i] - moved_by(f, copy, i, k, f_type, copy_type, mix)) / k.a;
        state[i] = previous;
        store(copy, i, copy_type, previous);
        if (adjoint)
            update_adjoint(adjoint, vjp, other, i, adjoint_k, copy_type, mix_adjoint);
    }
}

/* Calls a loop with constant flags, so that each combination is compiled separately. */
#define WIDE(C) (C == F64 ? F64 : F32)
#define INVERT(ADJOINT, VJP, OTHER, MIX, MIX_ADJOINT)                                                 \
    CONSTANT(F, f_type, CONSTANT(C, h->copy_type,                                                     \
        invert_loop(h->state + from, at(f, from, F), at(h->copy, from, C), ADJOINT, VJP, OTHER, n,    \
                    h->step, adjoint_step, MIX, MIX_ADJOINT, F, C)))
#define INVERT_ADJOINT(OTHER, MIX, MIX_ADJOINT) \
    INVERT(at(adjoint, from, WIDE(C)), at(vjp, from, C), OTHER, MIX, MIX_ADJOINT)

CLONES static void invert_chunk(const half_step *h, const void *f, int f_type, int64_t from, int64_t n, void *adjoint,
                                const void *vjp, const void *other, int left) {
    const int mix = h->step.c != 0;
    const coefficients adjoint_step = of_adjoint(h->adjoint, &h->each, left);
    if (left < 1) {
        copy_chunk(h, from, n);
        if (adjoint)
            update_adjoint_part(adjoint, vjp, NULL, h->copy_type, from, n, adjoint_step);
    } else if (!adjoint && mix)
        INVERT(NULL, NULL, NULL, 1, 0)
    else if (!adjoint)
        INVERT(NULL, NULL, NULL, 0, 0)
    else if (mix && other)
        INVERT_ADJOINT(at(other, from, WIDE(C)), 1, 1)
    else if (other)
        INVERT_ADJOINT(at(other, from, WIDE(C)), 0, 1)
    else if (mix)
        INVERT_ADJOINT(NULL, 1, 0)
    else
        INVERT_ADJOINT(NULL, 0, 0)
}

/* Compares the inverse with the initial state, in copy's dtype, and stores neither; see reference.py. */
INLINE void invert_compare_loop(const double *state, const void *f, const void *read, const void *initial,
                                void *adjoint, const void *vjp, const void *other, int64_t n, coefficients k,
                                coefficients adjoint_k, float floor, int32_t *worst, const int mix,
                                const int mix_adjoint, enum dtype f_type, enum dtype copy_type) {
    memset(worst, 0, LANES * sizeof *worst);
    for (int64_t row = 0; row < n; row += LANES) {
        int64_t lanes = n - row < LANES ? n - row : LANES;
#pragma omp simd
        for (int64_t lane = 0; lane < lanes; lane++) {
            int64_t i = row + lane;
            double previous = (state[i] - moved_by(f, read, i, k, f_type, copy_type, mix)) / k.a;
            int32_t bits = ratio_bits((float)(previous - load(initial, i, copy_type)), (float)state[i], floor);
            worst[lane] = bits > worst[lane] ? bits : worst[lane];
            if (adjoint)
                update_adjoint(adjoint, vjp, other, i, adjoint_k, copy_type, mix_adjoint);
        }
    }
}

CLONES static void invert_compare_chunk(const half_step *h, const void *f, int f_type, int64_t from, int64_t n,
                                        const void *initial, float floor, void *adjoint, const void *vjp,
                                        const void *other, int32_t *worst) {
    const int mix = h->step.c != 0; /* not a constant: this runs only twice per backward pass */
    CONSTANT(F, f_type, CONSTANT(C, h->copy_type,
        invert_compare_loop(h->state + from, at(f, from, F), at(h->copy, from, C), at(initial, from, C),
                            adjoint ? at(adjoint, from, WIDE(C)) : NULL, adjoint ? at(vjp, from, C) : NULL,
                            other ? at(other, from, WIDE(C)) : NULL, n, h->step, h->adjoint, floor, worst, mix,
                            other != NULL, F, C)))
}

/* read: what f read, or NULL where c is 0 */
API void revdeq_relax(const half_step *h, const void *f, int f_type, int threads, const void *read) {
    FOR_EACH_CHUNK(threads, relax_chunk(h, f, f_type, read, from, n, left))
}

/* partial: [2][chunks][LANES], the sums for the change and for the value */
API void revdeq_relax_norms(const half_step *h, const void *f, int f_type, int threads, const void *read,
                            double *partial) {
    FOR_EACH_CHUNK(threads, relax_norms_chunk(h, f, f_type, read, from, n, partial + chunk * LANES,
                                              partial + (chunks + chunk) * LANES, left))
}

/* adjoint, vjp and other may be NULL: then only the state is inverted; seed may be, too */
API void revdeq_invert(const half_step *h, const void *f, int f_type, int threads, void *adjoint, const void *vjp,
                       const void *other, void *seed, int seed_type) {
    FOR_EACH_CHUNK(threads,
                   invert_chunk(h, f, f_type, from, n, adjoint, vjp, other, left);
                   if (seed)
                       store_seed(adjoint, h->copy_type, seed, seed_type, from, n, left))
}

/* worst: [chunks][LANES], the largest errors relative to the state or to the floor */
API void revdeq_invert_compare(const half_step *h, const void *f, int f_type, int threads, const void *initial,
                               const float *floor, void *adjoint, const void *vjp, const void *other, int32_t *worst,
                               void *seed, int seed_type) {
    FOR_EACH_CHUNK(threads,
                   invert_compare_chunk(h, f, f_type, from, n, initial, *floor, adjoint, vjp, other,
                                        worst + chunk * LANES);
                   if (seed)
                       store_seed(adjoint, h->copy_type, seed, seed_type, from, n, left))
}
