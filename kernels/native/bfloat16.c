#define BATON_BFLOAT16 1
#include "native/step.h"

#include "native/single.h"
