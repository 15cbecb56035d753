/* The half-steps of the float64 state on the CPU, one pass over memory each; reference.py is their specification. */
#include "common.h"

enum kind { RELAX, NORMS, INVERT, COMPARE };

/* Elements in a row, with constant kinds and dtypes, and z only if `mix`: a condition in a loop would prevent
 * vectorisation. NORMS also adds up each lane's (next - state)^2 and next^2. COMPARE writes neither the state nor the
 * copy, which is the initial state. */
INLINE void step_row(enum kind kind, const half_step *h, double *state, const void *f, const void *z, void *copy,
                     int64_t n, double *change, double *value, float floor, int32_t *worst, enum dtype f_type,
                     enum dtype copy_type, const int mix) {
    const double a = h->a, b = h->b, c = h->c;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        double moved = b * load(f, i, f_type);
        if (mix)
            moved += c * load(z, i, copy_type);
        double next = kind == RELAX || kind == NORMS ? a * state[i] + moved : (state[i] - moved) / a;
        if (kind == COMPARE) {
            int32_t bits = ratio_bits((float)(next - load(copy, i, copy_type)), (float)state[i], floor);
            worst[i] = bits > worst[i] ? bits : worst[i];
        } else {
            if (kind == NORMS) {
                change[i] += (next - state[i]) * (next - state[i]);
                value[i] += next * next;
            }
            state[i] = next;
            store(copy, i, copy_type, next);
        }
    }
}

INLINE void step_rows(enum kind kind, const call *c, part p, double *change, double *value, float floor,
                      int32_t *worst, enum dtype f_type, enum dtype copy_type, const int mix) {
    const half_step h = *c->h;
    const int64_t size = kind == NORMS || kind == COMPARE ? LANES : p.n;
    for (int64_t row = p.from, end = p.from + p.n; row < end; row += size)
        step_row(kind, &h, (double *)h.state + row, at(c->f, row, f_type), mix ? at(c->z, row, copy_type) : NULL,
                 at(c->copy, row, copy_type), end - row < size ? end - row : size, change, value, floor, worst, f_type,
                 copy_type, mix);
}

#define STEP(KIND, ...)                                                                                             \
    if (c->z)                                                                                                       \
        CONSTANT(F, c->f_type, CONSTANT(C, c->copy_type, step_rows(KIND, c, p, __VA_ARGS__, F, C, 1)))               \
    else                                                                                                            \
        CONSTANT(F, c->f_type, CONSTANT(C, c->copy_type, step_rows(KIND, c, p, __VA_ARGS__, F, C, 0)))

CLONES static void relax(const call *c, part p) {
    STEP(RELAX, NULL, NULL, 0, NULL)
}

CLONES static void relax_norms(const call *c, part p) {
    double *change = (double *)c->sums + p.chunk * LANES, *value = change + p.chunks * LANES;
    memset(change, 0, LANES * sizeof *change);
    memset(value, 0, LANES * sizeof *value);
    STEP(NORMS, change, value, 0, NULL)
}

CLONES static void invert(const call *c, part p) {
    STEP(INVERT, NULL, NULL, 0, NULL)
}

CLONES static void compare(const call *c, part p) {
    int32_t *worst = c->compared->worst + p.chunk * LANES;
    memset(worst, 0, LANES * sizeof *worst);
    STEP(COMPARE, NULL, NULL, *c->compared->floor, worst)
}

static int relax_chunk(const call *c, part p) {
    c->sums ? relax_norms(c, p) : relax(c, p);
    return 0;
}

static int invert_chunk(const call *c, part p) {
    c->compared ? compare(c, p) : invert(c, p);
    update_adjoint(c, p);
    return 0;
}

API void revdeq_relax(const half_step *h, int threads, const void *f, int f_type, const void *z, void *copy,
                      int copy_type, double *sums) {
    call c = {.h = h, .f = f, .f_type = f_type, .z = z, .copy = copy, .copy_type = copy_type, .sums = sums};
    each_chunk(&c, threads, relax_chunk);
}

API void revdeq_invert(const half_step *h, int threads, const void *f, int f_type, const void *z, void *copy,
                       int copy_type, void *adjoint, const void *vjp, const void *other, void *seed, int seed_type,
                       const comparison *compared) {
    call c = {h, f, z, copy, adjoint, vjp, other, seed, NULL, compared, NULL, f_type, copy_type, seed_type};
    each_chunk(&c, threads, invert_chunk);
}
