/* The half-steps of the float64 state on the CPU, one pass over memory each; reference.py is their specification. */
#include "common.h"

enum kind { RELAX, NORMS, INVERT, COMPARE };

/* Elements in a row, with constant kinds and dtypes, and z only if `mix`: a condition in a loop would prevent
 * vectorisation. NORMS also adds up each lane's (next - state)^2 and next^2. COMPARE writes neither the state nor the
 * copy, which is the initial state. */
INLINE void step_row(enum kind kind, double a, double b, double c, double *state, const void *f, const void *z,
                     void *copy, int64_t n, double *change, double *value, float floor, int32_t *worst,
                     enum dtype f_type, enum dtype copy_type, const int mix) {
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

/* All elements at once, or row by row where lanes are summed up or compared. */
INLINE void step_rows(enum kind kind, const call *c, part p, enum dtype f_type, enum dtype copy_type, const int mix) {
    const int64_t end = p.from + p.n, size = kind == NORMS || kind == COMPARE ? LANES : p.n;
    double *change = NULL, *value = NULL;
    int32_t *worst = NULL;
    if (kind == NORMS) {
        change = (double *)c->sums + p.chunk * LANES, value = change + p.chunks * LANES;
        memset(change, 0, LANES * sizeof *change);
        memset(value, 0, LANES * sizeof *value);
    }
    if (kind == COMPARE)
        memset(worst = c->worst + p.chunk * LANES, 0, LANES * sizeof *worst);
    for (int64_t row = p.from; row < end; row += size)
        step_row(kind, c->a, c->b, c->c, (double *)c->state + row, at(c->f, row, f_type),
                 mix ? at(c->z, row, copy_type) : NULL, at(c->copy, row, copy_type),
                 end - row < size ? end - row : size, change, value, kind == COMPARE ? *c->floor : 0, worst, f_type,
                 copy_type, mix);
}

#define STEP(KIND)                                                                                                  \
    if (c->z)                                                                                                       \
        CONSTANT(F, c->f_type, CONSTANT(C, c->copy_type, step_rows(KIND, c, p, F, C, 1)))                           \
    else                                                                                                            \
        CONSTANT(F, c->f_type, CONSTANT(C, c->copy_type, step_rows(KIND, c, p, F, C, 0)))

CLONES static void relax(const call *c, part p) { STEP(RELAX) }
CLONES static void relax_norms(const call *c, part p) { STEP(NORMS) }
CLONES static void invert(const call *c, part p) { STEP(INVERT) }
CLONES static void compare(const call *c, part p) { STEP(COMPARE) }

static int step_chunk(const call *c, part p) {
    if (!c->inverse) {
        c->sums ? relax_norms(c, p) : relax(c, p);
        return 0;
    }
    c->floor ? compare(c, p) : invert(c, p);
    update_adjoint(c, p);
    return 0;
}

API int revdeq_float64(const call *c) { return each_chunk(c, step_chunk); }
