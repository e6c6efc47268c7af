/* A team under stress: phases of all sizes, each checked by the next. Arguments: threads, runs. Prints "ok". */
#include "native/threads.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { CELLS = 4096, PHASES = 40 };

static long cells[CELLS], sums[PHASES];
static int used, strangers; /* threads of the run; whether another one took an item */

static long items_of(long phase) { return 1 + phase * 37 % CELLS; }

static void count_up(const void *argument, long item, int thread) {
    (void)argument;
    if (thread >= used) __atomic_store_n(&strangers, 1, __ATOMIC_RELAXED);
    cells[item]++;
}

static void add_up(const void *argument, long item, int thread) {
    (void)item, (void)thread;
    long *sum = *(long *const *)argument;
    *sum = 0;
    for (int i = 0; i < CELLS; i++) *sum += cells[i];
}

static void program(void *argument, baton_team *team, int thread) {
    (void)argument;
    for (long phase = 0; phase < PHASES; phase += 2) {
        long *target = &sums[phase];
        team_phase(team, thread, phase, items_of(phase), count_up, NULL);
        team_phase(team, thread, phase + 1, 1, add_up, &target);
    }
}

int main(int count, char **arguments) {
    baton_team *team = count == 3 ? team_new(atoi(arguments[1])) : NULL;
    if (!team) return 2;
    long expected = 0;
    for (int run = 0; run < atoi(arguments[2]); run++) {
        used = 1 + run / 3 % team_size(team);
        /* more or fewer than there are mean all or one */
        team_use(team, used == 1 ? -run : used == team_size(team) ? used + run : used);
        if (team_run(team, program, NULL, PHASES)) return 2;
        for (long phase = 0; phase < PHASES; phase += 2) {
            expected += items_of(phase);
            if (sums[phase] != expected) {
                printf("run %d phase %ld: %ld instead of %ld\n", run, phase, sums[phase], expected);
                return 1;
            }
        }
        if (strangers) {
            printf("run %d: a thread beside the %d in use\n", run, used);
            return 1;
        }
        if (run % 50 == 0) usleep(300); /* long enough for threads to fall asleep */
    }
    team_free(team);
    puts("ok");
    return 0;
}
