/* Sampling of rows of logits, as kernels/sampling/__init__.py and reference.py define it: the same tokens.
 *
 * A row is read once for the largest logit of every block of 64 tokens; most of it is not looked at again. A token is
 * drawn by its value plus Gumbel noise, -log(-log(u)): a token of value v can beat a score only if -log(u) <= e^(v - score),
 * and 1 - u is less than -log(u). So noise is made for blocks, and logarithms for the few tokens that could win. */
#ifndef BATON_SAMPLING_KERNEL_H
#define BATON_SAMPLING_KERNEL_H

#include "sampling/cpu_filter.h"

static const float NOISE_MOST = 23.0f;  /* more than the noise of any word */
static const float NOISE_SLACK = 1e-3f; /* more than a score, and an exponential in float, lose to rounding */

/* ------------------------------------------------------------------------------------------------------------ the row */

INLINE long row_blocks(long vocab) { return pieces(vocab, TOKENS); }
INLINE long row_tops(long vocab) { return pieces(row_blocks(vocab), LANES) * LANES; }

static size_t row_bytes(long vocab) {
    const size_t tokens = (size_t)row_blocks(vocab) * TOKENS;
    return tokens * (sizeof(float) + 2 * sizeof(uint64_t)) + (size_t)row_tops(vocab) * sizeof(float);
}

static sampled_row row_in(void *memory, long vocab) {
    const long tokens = row_blocks(vocab) * TOKENS;
    uint64_t *list = memory, *spare = list + tokens;
    float *own = (float *)(spare + tokens);
    return (sampled_row){.own = own, .tops = own + tokens, .list = list, .spare = spare, .vocab = vocab,
                         .blocks = row_blocks(vocab)};
}

/* Whether all words are zero. */
INLINE int are_zero(words16 words) {
    uint32_t each[LANES], any = 0;
    store_words(each, words);
    for (int i = 0; i < LANES; i++) any |= each[i];
    return !any;
}

/* Let the row be of these logits; whether their largest is finite and none is NaN. Tops and top are theirs. */
static int look(sampled_row *row, const float *logits) {
    words16 strange = zero_words();
    float largest = -INFINITY;
    row->logits = logits;
    for (long block = 0; block < row->blocks; block++) {
        lanes top = fill(-INFINITY);
        for (long first = block * TOKENS; first < smaller((block + 1) * TOKENS, row->vocab); first += LANES) {
            const lane_mask mask = first_lanes(row->vocab - first);
            const lanes v = load_part(logits + first, mask);
            strange = or_nan(strange, v);
            top = first + LANES <= row->vocab ? higher(v, top) : higher_part(top, mask, v);
        }
        row->tops[block] = top_lane(top);
        if (row->tops[block] > largest) largest = row->tops[block];
    }
    for (long i = row->blocks; i < row_tops(row->vocab); i++) row->tops[i] = -INFINITY;
    row->top = largest;
    return are_zero(strange) && largest > -INFINITY && largest < INFINITY;
}

/* The first token of the largest logit. */
static long first_largest(const sampled_row *row) {
    long block = 0;
    while (row->tops[block] != row->top) block++;
    long id = block * TOKENS;
    while (row->logits[id] != row->top) id++;
    return id;
}

/* From logits to values: quotients round no smaller one above a larger one. Returns the first token of the largest. */
static long divide_by(sampled_row *row, float divisor) {
    row->divisor = divisor;
    const float largest = row->top;
    if (divisor != 1.0f) row->top = largest / divisor < FLT_MAX ? largest / divisor : FLT_MAX;
    for (long i = 0; i < row_tops(row->vocab); i += LANES) {
        lanes v = load(row->tops + i);
        if (divisor != 1.0f) v = lower(divide(v, fill(divisor)), fill(FLT_MAX));
        store(row->tops + i, add(sub(v, fill(row->top)), zeros()));
    }
    long block = 0;
    while (row->tops[block] != 0.0f) block++;
    long first = block * TOKENS;
    uint32_t bits;
    while (!(bits = at_least(values_at(row, first), zeros()))) first += LANES;
    return first + __builtin_ctz(bits);
}

/* --------------------------------------------------------------------------------------------------------- adjustment */

/* Penalties for tokens of prompt and output, the latter counted. */
static void penalize(sampled_row *row, const baton_row *how) {
    const uint32_t done = UINT32_MAX;
    uint32_t *counts = (uint32_t *)row->spare;
    memset(counts, 0, (size_t)row->vocab * sizeof *counts);
    for (int64_t i = how->num_prompt; i < how->num_said; i++) counts[how->said[i]]++;
    for (int64_t i = 0; i < how->num_said; i++) {
        const int64_t id = how->said[i];
        if (counts[id] == done) continue;
        float value = row->own[id];
        value = value > 0 ? value / how->repetition : value * how->repetition;
        value -= how->frequency * (float)counts[id];
        value -= counts[id] ? how->presence : 0.0f;
        row->own[id] = value;
        counts[id] = done;
    }
}

static void forbid(sampled_row *row, const uint32_t *allowed) {
    for (long first = 0; first < row->vocab; first += 32) {
        const uint32_t word = allowed[first / 32];
        if (word == UINT32_MAX) continue;
        for (long i = first; i < smaller(first + 32, row->vocab); i++)
            if (!(word >> (i - first) & 1)) row->own[i] = -INFINITY;
    }
}

INLINE int is_adjusted(const baton_row *how) { return how->num_said || how->num_biases || how->allowed; }

/* The row's logits, adjusted, as its own. */
static void adjust(sampled_row *row, const baton_row *how) {
    memcpy(row->own, row->logits, (size_t)row->vocab * sizeof(float));
    if (how->num_said) penalize(row, how);
    for (int64_t i = 0; i < how->num_biases; i++) row->own[how->bias_ids[i]] += how->bias_values[i];
    if (how->allowed) forbid(row, how->allowed);
}

/* ---------------------------------------------------------------------------------------------------------------- draw */

typedef struct {
    survivors kept;
    float score;
    long best;
} drawing;

static float noise_of(const baton_row *how, long id) {
    words16 words[4];
    uint32_t stored[TOKENS];
    noise_words(how->seed, how->position, id / TOKENS, words);
    for (int i = 0; i < 4; i++) store_words(stored + i * LANES, words[i]);
    return gumbel_of(stored[id % TOKENS]);
}

/* Tokens of a quarter of a block that could win, one after the other. */
static void draw_quarter(const sampled_row *row, long first, words16 words, drawing *d) {
    const lanes v = values_at(row, first);
    /* 1 - u, not more of it than there is */
    const lanes less = mul(to_floats(shift_right(xor_words(words, fill_words(-1)), 8)), fill(0x1p-24f));
    float values[LANES];
    uint32_t stored[LANES], bits = at_least(exponential(add(v, fill(NOISE_SLACK - d->score))), less);
    store(values, v);
    store_words(stored, words);
    for (; bits; bits &= bits - 1) {
        const int lane = __builtin_ctz(bits);
        const long id = first + lane;
        const float value = values[lane];
        if (!(value > d->kept.least || (value == d->kept.least && id <= d->kept.last))) continue;
        const float sum = value + gumbel_of(stored[lane]);
        if (sum > d->score || (sum == d->score && id < d->best)) {
            d->score = sum;
            d->best = id;
        }
    }
}

/* The survivor of the largest value plus noise, the lowest id of those; `best` is the first of the survivors, whose value
 * is 0. */
static long draw(const sampled_row *row, const baton_row *how, survivors kept, long best) {
    drawing d = {kept, 0.0f + noise_of(how, best), best};
    float limits[LANES];
    for (long block = 0; block < row->blocks; block++) {
        if (block % LANES == 0) {
            /* u * 2^24 that a token of a block has at least, to win: the score only rises */
            const lanes most = exponential(add(load(row->tops + block), fill(NOISE_SLACK - d.score)));
            store(limits, fused_minus(most, fill(0x1p24f), fill(0x1p24f - 3.0f)));
        }
        if (row->tops[block] < kept.least || row->tops[block] + NOISE_MOST < d.score) continue;
        words16 words[4];
        noise_words(how->seed, how->position, block, words);
        const lanes limit = fill(limits[block % LANES]);
        for (int i = 0; i < 4; i++)
            if (at_least(to_floats(shift_right(words[i], 8)), limit))
                draw_quarter(row, block * TOKENS + i * LANES, words[i], &d);
    }
    return d.best;
}

/* -------------------------------------------------------------------------------------------------- log-probabilities */

/* Of the logits as given: of the token, then of the most likely ones. */
static void tell(sampled_row *row, const float *logits, long token, long wanted, double *logprobs, int64_t *ids) {
    look(row, logits);
    const double top = (double)row->top;
    row->divisor = 1.0f;
    row->top = 0.0f; /* values are the logits */
    const double all = logarithm_of_double(mass_above(row, top));
    logprobs[0] = (double)row->logits[token] - top - all;
    const long count = wanted ? list_largest(row, wanted) : 0;
    for (long i = 0; i < wanted; i++) {
        ids[i] = i < count ? id_of(row->list[i]) : -1;
        logprobs[1 + i] = i < count ? (double)value_in(row->list[i]) - top - all : -INFINITY;
    }
}

/* ----------------------------------------------------------------------------------------------------------------- row */

/* The token of a row, or -1 where its largest logit, as given, adjusted or over the temperature, is not finite. */
static long sample_row(sampled_row *row, const float *logits, const baton_row *how) {
    if (!look(row, logits)) return -1;
    if (is_adjusted(how)) {
        adjust(row, how);
        if (!look(row, row->own)) return -1;
    }
    if (!(how->temperature > 0.0f)) return first_largest(row);
    if (row->top / how->temperature < -FLT_MAX) return -1;
    const long best = divide_by(row, how->temperature);
    return draw(row, how, filter(row, how), best);
}

#endif
