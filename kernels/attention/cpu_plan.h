/* The plan of a step's attention: which query rows are computed together, and what they read together.
 *
 * Only speed depends on it: a row's result is the same in any unit. */
#ifndef BATON_ATTENTION_PLAN_H
#define BATON_ATTENTION_PLAN_H

#include "attention/cpu_kernel.h"
#include "native/model.h"

#include <stdlib.h>

enum { FEW_TOKENS = 8 };    /* so many tokens of a sequence at most are cut by splits, and share what they read */
enum { LEAST_COMMON = 64 }; /* keys of a split that are worth sharing */
enum { ITEMS_A_THREAD = 4 }; /* so many at least, where pieces are put together */

typedef struct {
    const query_piece *pieces;
    const query_unit *units;
    uint64_t *ended;
    long num_units;
} attention_plan;

INLINE long NAME(group_of)(const baton_model *model) { return model->q_heads / model->kv_heads; }
INLINE long NAME(piece_tokens)(const baton_model *model) { return larger(1, PIECE_ROWS / NAME(group_of)(model)); }

/* How many pieces a step has, and how many units at most. */
static void NAME(count_pieces)(const baton_model *model, const baton_step *step, long *count, long *units) {
    const long most = NAME(piece_tokens)(model);
    *count = *units = 0;
    for (long i = 0; i < step->num_sequences; i++) {
        const long tokens = step->cu_seqlens[i + 1] - step->cu_seqlens[i], parts = pieces(tokens, most);
        *count += parts;
        *units += tokens <= FEW_TOKENS ? parts * pieces(step->seq_lens[i], SPLIT) : parts;
    }
}

/* Pieces of every sequence: those of sequences with few tokens first, then the others, the last and longest of a
 * sequence first.
 * Returns how many are of the first kind; `partials`: how many partial results these need, in tokens. */
static long NAME(make_pieces)(const baton_model *model, const baton_step *step, const baton_group *group,
                              const char *wanted, long count, query_piece *all, long *partials) {
    const long most = NAME(piece_tokens)(model);
    query_piece *few = all, *many = all + count;
    *partials = 0;
    for (long i = 0; i < step->num_sequences; i++) {
        const long first = step->cu_seqlens[i], tokens = step->cu_seqlens[i + 1] - first;
        for (long at = 0; at < tokens; at += most) {
            query_piece piece = {.row = first + at, .tokens = smaller(most, tokens - at), .partial = -1};
            piece.position = step->seq_lens[i] - tokens + at;
            piece.table = group->tables + group->table_starts[i];
            piece.seen = (piece.position + 1) / group->block_size;
            piece.splits = pieces(piece.position + piece.tokens, SPLIT);
            piece.wanted = memchr(wanted + piece.row, 1, (size_t)piece.tokens) != NULL;
            if (tokens <= FEW_TOKENS) {
                piece.partial = *partials;
                *partials += piece.splits * piece.tokens;
                *few++ = piece;
            } else {
                *--many = piece;
            }
        }
    }
    return few - all;
}

/* So that tables which begin alike stand side by side. */
static int NAME(by_table)(const void *a, const void *b) {
    const query_piece *x = a, *y = b;
    for (long i = 0; i < smaller(x->seen, y->seen); i++)
        if (x->table[i] != y->table[i]) return x->table[i] < y->table[i] ? -1 : 1;
    if (x->seen != y->seen) return x->seen < y->seen ? -1 : 1;
    return x->row < y->row ? -1 : 1;
}

/* Keys of a split, from its first, that two pieces have in the same blocks and see with every row. */
static long NAME(common_keys)(const query_piece *a, const query_piece *b, long split, long block_size) {
    const long begin = split * SPLIT, end = begin + SPLIT, seen = smaller(a->seen, b->seen);
    long block = begin / block_size;
    while (block < seen && block * block_size < end && a->table[block] == b->table[block]) block++;
    return larger(0, smaller(block * block_size, end) - begin);
}

/* Units of one split: pieces side by side that have at least half of it in common. */
static query_unit *NAME(share_split)(const query_piece *all, long few, long split, long block_size, long most,
                                     query_unit *to) {
    query_unit *unit = NULL;
    for (long i = 0; i < few; i++) {
        if (split >= all[i].splits) {
            unit = NULL;
            continue;
        }
        if (unit && unit->count < most) {
            const long common = NAME(common_keys)(&all[unit->piece], &all[i], split, block_size);
            if (common >= LEAST_COMMON && (unit->count == 1 || 2 * common >= unit->common)) {
                unit->common = unit->count++ == 1 ? common : smaller(common, unit->common);
                continue;
            }
        }
        unit = to++;
        *unit = (query_unit){i, 1, split, 0};
    }
    return to;
}

/* Pieces that a unit may hold. */
static long NAME(most_together)(const baton_model *model, const query_piece *all, long few, int threads) {
    long splits = 0;
    for (long i = 0; i < few; i++) splits += all[i].splits;
    const long for_threads = splits * model->kv_heads / (ITEMS_A_THREAD * threads);
    return larger(1, smaller(for_threads, PIECE_ROWS / NAME(group_of)(model)));
}

static void NAME(plan_group)(const baton_model *model, const baton_step *step, const baton_group *group,
                             const char *wanted, long count, int threads, query_piece *all, query_unit *units,
                             attention_plan *plan, long *partials) {
    long few = NAME(make_pieces)(model, step, group, wanted, count, all, partials), splits = 0;
    query_unit *end = units;
    qsort(all, (size_t)few, sizeof *all, NAME(by_table));
    for (long i = few; i < count; i++) *end++ = (query_unit){i, 1, -1, 0};
    for (long i = 0; i < few; i++) splits = larger(splits, all[i].splits);
    const long most = NAME(most_together)(model, all, few, threads);
    for (long split = 0; split < splits; split++)
        end = NAME(share_split)(all, few, split, group->block_size, most, end);
    plan->pieces = all;
    plan->units = units;
    plan->num_units = end - units;
}

/* Plans of all layer groups of a step; `partials`: memory for the partial results of whichever is at work. */
static int NAME(plan_attention)(baton_team *team, const baton_model *model, const baton_step *step,
                                attention_plan *plans, float **partials) {
    long count, most_units, rows = 0;
    NAME(count_pieces)(model, step, &count, &most_units);
    const size_t groups = (size_t)step->num_groups, counters = (size_t)(count * model->kv_heads);
    query_piece *all = team_memory(team, -1, PIECES, groups * (size_t)count * sizeof(query_piece));
    query_unit *units = team_memory(team, -1, UNITS, groups * (size_t)most_units * sizeof(query_unit));
    uint64_t *ended = team_memory(team, -1, ENDED, groups * counters * sizeof(uint64_t));
    char *wanted = team_memory(team, -1, WANTED, (size_t)step->num_tokens);
    if (!all || !units || !ended || !wanted) return NO_MEMORY;
    memset(ended, 0, groups * counters * sizeof(uint64_t));
    memset(wanted, 0, (size_t)step->num_tokens);
    for (long i = 0; i < step->num_logits; i++) wanted[step->logit_rows[i]] = 1;
    for (long g = 0; g < step->num_groups; g++) {
        NAME(plan_group)(model, step, &step->groups[g], wanted, count, team_size(team), all + g * count,
                         units + g * most_units, &plans[g], &rows);
        plans[g].ended = ended + (size_t)g * counters;
    }
    *partials = team_memory(team, -1, PARTIALS,
                            (size_t)(rows * model->q_heads * (model->head_dim + VALUES)) * sizeof(float));
    return *partials ? OK : NO_MEMORY;
}

/* Memory of every thread. */
static int NAME(reserve_attention)(baton_team *team, const baton_model *model) {
    const size_t d = (size_t)model->head_dim;
    const size_t rows = (size_t)larger(PIECE_ROWS, NAME(group_of)(model));
    for (int i = 0; i < team_size(team); i++)
        if (!team_memory(team, i, SCORES_SLOT, MOST_ROWS * (SCORE_STRIDE + d) * sizeof(float)) ||
            !team_memory(team, i, WEIGHTS_SLOT, MOST_ROWS * WEIGHT_STRIDE * sizeof(float)) ||
            !team_memory(team, i, QUERIES_SLOT, MOST_ROWS * d * sizeof(float)) ||
            !team_memory(team, i, RESULT_SLOT, MOST_ROWS * (d + VALUES) * sizeof(float)) ||
            !team_memory(team, i, STATE_SLOT, rows * (d + VALUES) * sizeof(float)))
            return NO_MEMORY;
    return OK;
}

#endif
