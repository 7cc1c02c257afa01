/* What every instruction set's file includes before it sets its target. */
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "matrix.h"
#include "numbers.h"
#include "operation.h"
#include "quant.h"
#include "sample.h"
