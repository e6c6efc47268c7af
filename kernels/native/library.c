/* The library's door: what ctypes calls beside the functions of step.h. */
#include "model.h"
#include "threads.h"

/* Sizes of the structures, so that Python can tell that it means the same. */
void baton_sizes(int64_t sizes[9]) {
    sizes[0] = sizeof(baton_linear);
    sizes[1] = sizeof(baton_layer);
    sizes[2] = sizeof(baton_model);
    sizes[3] = sizeof(baton_group);
    sizes[4] = sizeof(baton_step);
    sizes[5] = sizeof(baton_row);
    sizes[6] = sizeof(baton_sampling);
    sizes[7] = sizeof(baton_logprobs);
    sizes[8] = sizeof(baton_stretch);
}

baton_team *baton_open(int64_t threads) { return threads > 0 && threads <= 1024 ? team_new((int)threads) : 0; }
void baton_use(baton_team *team, int64_t threads) { team_use(team, threads > 1024 ? 1024 : (int)threads); }
void baton_close(baton_team *team) { team_free(team); }
