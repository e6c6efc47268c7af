/* Sampling of rows of logits, and their log-probabilities: a row an item. In calls of their own, as what a grammar allows
 * is worked out while a step runs. */
#include "native/model.h"
#include "native/threads.h"

#define BATON_BFLOAT16 0
#include "sampling/cpu_kernel.h"

/* The team's memory: behind what steps use. */
enum { SAMPLED = TEAM_SLOTS - 1 };

typedef struct {
    baton_team *team;
    baton_item *item;
    const void *what;
    int64_t items, vocab;
} rows_run;

static sampled_row row_of(const rows_run *run, int thread) {
    return row_in(team_memory(run->team, thread, SAMPLED, row_bytes(run->vocab)), run->vocab);
}

static void rows_program(void *argument, baton_team *team, int thread) {
    const rows_run *run = argument;
    team_phase(team, thread, 0, run->items, run->item, run);
}

static int run_rows(const rows_run *run) {
    for (int thread = 0; thread < team_size(run->team); thread++)
        if (!team_memory(run->team, thread, SAMPLED, row_bytes(run->vocab))) return NO_MEMORY;
    if (run->items > 1) return team_run(run->team, rows_program, (void *)run, 1) ? NO_MEMORY : OK;
    if (run->items == 1) run->item(run, 0, 0); /* waking threads costs more */
    return OK;
}

static int are_tokens(const int64_t *ids, int64_t count, int64_t vocab) {
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= vocab) return 0;
    return 1;
}

/* ids are kept in 32 bits */
static int is_vocab(int64_t vocab) { return vocab > 0 && vocab <= INT32_MAX; }

static int check_row(const baton_row *row, int64_t vocab) {
    if (row->num_said < 0 || row->num_prompt < 0 || row->num_prompt > row->num_said) return BAD_SAMPLING;
    if (row->num_biases < 0) return BAD_SAMPLING;
    if (!are_tokens(row->said, row->num_said, vocab)) return BAD_TOKEN;
    return are_tokens(row->bias_ids, row->num_biases, vocab) ? OK : BAD_TOKEN;
}

static void sample_item(const void *argument, long item, int thread) {
    const rows_run *run = argument;
    const baton_sampling *sampling = run->what;
    sampled_row row = row_of(run, thread);
    sampling->tokens[item] = sample_row(&row, sampling->logits + item * sampling->vocab, &sampling->rows[item]);
}

int baton_sample(baton_team *team, const baton_sampling *sampling) {
    if (sampling->num_rows < 0 || !is_vocab(sampling->vocab)) return BAD_SAMPLING;
    for (int64_t i = 0; i < sampling->num_rows; i++) {
        const int code = check_row(&sampling->rows[i], sampling->vocab);
        if (code) return code;
    }
    const rows_run run = {team, sample_item, sampling, sampling->num_rows, sampling->vocab};
    return run_rows(&run);
}

static void logprobs_item(const void *argument, long item, int thread) {
    const rows_run *run = argument;
    const baton_logprobs *told = run->what;
    sampled_row row = row_of(run, thread);
    tell(&row, told->logits + told->rows[item] * told->vocab, told->tokens[item], told->tops[item],
         told->logprobs + item * (1 + told->most_top), told->top_ids + item * told->most_top);
}

int baton_logprobs_of(baton_team *team, const baton_logprobs *told) {
    if (told->num_wanted < 0 || !is_vocab(told->vocab) || told->most_top < 0) return BAD_SAMPLING;
    if (!are_tokens(told->tokens, told->num_wanted, told->vocab)) return BAD_TOKEN;
    if (!are_tokens(told->rows, told->num_wanted, told->num_rows)) return BAD_LOGIT_ROW;
    for (int64_t i = 0; i < told->num_wanted; i++)
        if (told->tops[i] < 0 || told->tops[i] > told->most_top) return BAD_SAMPLING;
    const rows_run run = {team, logprobs_item, told, told->num_wanted, told->vocab};
    return run_rows(&run);
}
