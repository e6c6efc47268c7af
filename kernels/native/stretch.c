/* Steps of decodes, one after the other: the same calls as one by one, with nobody between them.
 *
 * What stands between two steps in Python is cold code each time, since a step's weights have passed through the caches. */
#include <time.h>

#include "model.h"
#include "threads.h"

int baton_step_bfloat16(baton_team *team, const baton_model *model, const baton_step *step);
int baton_step_float32(baton_team *team, const baton_model *model, const baton_step *step);
int baton_sample(baton_team *team, const baton_sampling *sampling);

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Where the KV of a row's `position` goes; -1: its table does not reach so far. */
static int64_t slot_of(const baton_group *group, int64_t row, int64_t position) {
    const int64_t at = group->table_starts[row] + position / group->block_size;
    if (at >= group->table_starts[row + 1]) return -1;
    return group->tables[at] * group->block_size + position % group->block_size;
}

/* A row's next step: its token is the one it drew. */
static int follow_row(const baton_stretch *stretch, int64_t row) {
    const baton_step *step = stretch->step;
    const int64_t after = step->positions[row] + 1;
    for (int64_t g = 0; g < step->num_groups; g++) {
        const int64_t slot = slot_of(&step->groups[g], row, after);
        if (slot < 0) return BAD_BLOCK;
        ((int64_t *)step->groups[g].slots)[row] = slot;
    }
    ((int64_t *)step->tokens)[row] = stretch->draws->tokens[row];
    ((int64_t *)step->positions)[row] = after;
    ((int64_t *)step->seq_lens)[row] = after + 1;
    ((baton_row *)stretch->draws->rows)[row].position = (uint64_t)after + 1;
    return OK;
}

static int one_step(baton_team *team, const baton_stretch *stretch) {
    for (int64_t row = 0; row < stretch->draws->num_rows; row++) {
        const int code = follow_row(stretch, row);
        if (code) return code;
    }
    const int code = (stretch->is_bfloat16 ? baton_step_bfloat16 : baton_step_float32)(team, stretch->model,
                                                                                       stretch->step);
    return code ? code : baton_sample(team, stretch->draws);
}

static int is_ending(const baton_stretch *stretch, int64_t token) {
    for (int64_t i = 0; i < stretch->num_ending; i++)
        if (stretch->ending[i] == token) return 1;
    return token < 0;
}

/* Keeps what the step drew. Returns whether a row has to end. */
static int keep(baton_stretch *stretch) {
    const int64_t rows = stretch->draws->num_rows, first = stretch->taken * rows;
    int ends = 0;
    for (int64_t row = 0; row < rows; row++) {
        stretch->tokens[first + row] = stretch->draws->tokens[row];
        if (stretch->step->rechecked) stretch->rechecked[first + row] = stretch->step->rechecked[row];
        ends |= is_ending(stretch, stretch->draws->tokens[row]);
    }
    return ends;
}

/* Nothing may go on behind a step that was refused. */
int baton_go_on(baton_team *team, baton_stretch *stretch) {
    double begun = now_s();
    for (stretch->taken = 0; stretch->taken < stretch->most;) {
        const int code = one_step(team, stretch);
        if (code) return code;
        const int ends = keep(stretch);
        const double now = now_s();
        stretch->ends[stretch->taken++] = now;
        if (ends || *stretch->halt || now + (now - begun) > stretch->until) break;
        begun = now;
    }
    return OK;
}
