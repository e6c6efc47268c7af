#ifndef BATON_CHECK_H
#define BATON_CHECK_H

#include "model.h"

/* OK, or what is wrong with the step. Looks at every number that becomes an address. */
int check_step(const baton_model *model, const baton_step *step);

/* OK, or BAD_MODEL for a weight that is not there or in no known format. */
int check_linear(const baton_linear *linear);

#endif
