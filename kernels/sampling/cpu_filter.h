/* What top-k, top-p and min-p leave of a row: always the first so many tokens in the order of cpu_order.h, told by the
 * last of them.
 *
 * The mass of all tokens is summed in float first, which is near enough to tell the last token of top-p but for few rows:
 * there it is summed again in double. Few candidates are sorted for it; where they do not reach the mass, all that could
 * belong to it are shared out to bins, and one bin is sorted. */
#ifndef BATON_SAMPLING_FILTER_H
#define BATON_SAMPLING_FILTER_H

#include <limits.h>

#include "native/model.h"
#include "sampling/cpu_order.h"

enum { FIRST_CANDIDATES = 256, BINS = 1024, BINS_A_UNIT = 32 };
static const long UNSURE = -1;

/* The first tokens in order, up to the one of this value and id. */
typedef struct {
    float least;
    long last;
} survivors;

typedef struct {
    double mass, error; /* of e^value of all tokens, and what it can be wrong by, relatively */
} row_mass;

/* Blocks below this have together less of the mass than `error` says. */
static const float NO_MASS = -28.0f;

static row_mass rough_mass(const sampled_row *row) {
    double mass = 0;
    for (long block = 0; block < row->blocks; block++) {
        if (row->tops[block] < NO_MASS) continue;
        lanes sum = zeros();
        for (long first = block * TOKENS; first < smaller((block + 1) * TOKENS, row->vocab); first += LANES)
            sum = add(sum, exponential(values_at(row, first)));
        mass += (double)sum_lanes(sum);
    }
    /* of an exponential 2e-7, of eight sums 2^-24 each, doubled */
    return (row_mass){mass, 1.4e-6 + 7e-13 * (double)row->vocab};
}

static row_mass whole_mass(const sampled_row *row) {
    return (row_mass){mass_above(row, 0), 0};
}

/* How many of the first `count` of the list reach a share of the mass, with what was there before; none: 0. UNSURE where
 * the mass is not known well enough. */
static long reach(const sampled_row *row, long count, double before, double share, row_mass all) {
    const double surely = share * all.mass * (1 + all.error), perhaps = share * all.mass * (1 - all.error);
    for (long i = 0; i < count; i++) {
        before += mass_in(row->list[i]);
        if (before >= perhaps) return before >= surely ? i + 1 : UNSURE;
    }
    return 0;
}

INLINE survivors up_to(const sampled_row *row, long count) {
    return (survivors){value_in(row->list[count - 1]), id_of(row->list[count - 1])};
}

INLINE int bin_of(float value) { return value > -(float)BINS / BINS_A_UNIT ? (int)(value * -BINS_A_UNIT) : BINS - 1; }

/* The list's entries of one bin. */
static long pick_bin(sampled_row *row, long count, int bin) {
    long picked = 0;
    for (long i = 0; i < count; i++)
        if (bin_of(value_in(row->list[i])) == bin) row->list[picked++] = row->list[i];
    return picked;
}

/* Masses of the list's first `count` entries, added up by bin. */
static void share_out(const sampled_row *row, long count, double masses[BINS]) {
    for (long first = 0; first < count; first += TOKENS) {
        const int some = (int)smaller(TOKENS, count - first);
        float values[TOKENS];
        double each[TOKENS];
        for (int i = 0; i < TOKENS; i++) values[i] = i < some ? value_in(row->list[first + i]) : -INFINITY;
        exponentials_of(values, 0, each);
        for (int i = 0; i < some; i++) masses[bin_of(values[i])] += each[i];
    }
}

/* As `nucleus`, of all tokens that could belong to it. `last` is UNSURE as `reach` is. */
static survivors wide_nucleus(sampled_row *row, double share, row_mass all) {
    /* tokens below it have, all together, less than what may be left out */
    const double surely = all.mass * (1 - all.error), most = (1 - share) * surely / (double)row->vocab;
    const float least = most > 0 ? (float)logarithm_of_double(most) - 1e-3f : -FLT_MAX;
    const long count = gather(row, least);
    double masses[BINS] = {0}, before = 0;
    share_out(row, count, masses);
    int bin = 0;
    while (bin < BINS - 1 && before + masses[bin] < share * surely) before += masses[bin++];
    const long picked = pick_bin(row, count, bin);
    sort_list(row, picked);
    const long needed = reach(row, picked, before, share, all);
    if (needed > 0) return up_to(row, needed);
    if (all.error > 0) return (survivors){INFINITY, UNSURE};
    return picked ? up_to(row, picked) : (survivors){least, LONG_MAX}; /* by rounding, a little more than there is */
}

/* The smallest set of largest values whose share of the mass reaches `share`. */
static survivors nucleus(sampled_row *row, double share) {
    const long count = list_largest(row, FIRST_CANDIDATES);
    row_mass all = rough_mass(row);
    long needed = reach(row, count, 0, share, all);
    /* a token that is no larger than what the mass can be wrong by would hardly be told from the next */
    const int finer = !needed && mass_in(row->list[count - 1]) < 32 * all.error * all.mass;
    if (needed == UNSURE || finer) all = whole_mass(row);
    if (needed == UNSURE) needed = reach(row, count, 0, share, all);
    if (needed) return up_to(row, needed);
    const survivors kept = wide_nucleus(row, share, all);
    return kept.last == UNSURE ? wide_nucleus(row, share, whole_mass(row)) : kept;
}

/* Of the `top_k` largest, those whose share reaches `top_p`. */
static survivors largest(sampled_row *row, long top_k, double top_p) {
    long count = smaller(list_largest(row, top_k), top_k);
    if (top_p < 1.0) {
        row_mass all = {0, 0};
        for (long i = 0; i < count; i++) all.mass += mass_in(row->list[i]);
        const long needed = reach(row, count, 0, top_p, all);
        if (needed) count = needed;
    }
    return up_to(row, count);
}

static survivors filter(sampled_row *row, const baton_row *how) {
    survivors kept = {-FLT_MAX, LONG_MAX};
    if (how->top_k > 0 && how->top_k < row->vocab)
        kept = largest(row, how->top_k, how->top_p);
    else if (how->top_p < 1.0)
        kept = nucleus(row, how->top_p);
    if (how->log_min_p > -INFINITY) {
        float least = (float)how->log_min_p;
        if ((double)least < how->log_min_p) least = nextafterf(least, INFINITY);
        if (least > kept.least) kept = (survivors){least, LONG_MAX};
    }
    return kept;
}

#endif
