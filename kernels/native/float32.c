#define BATON_BFLOAT16 0
#include "native/step.h"

#include "native/single.h"
