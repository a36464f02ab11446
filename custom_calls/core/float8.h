// The tables of the 8-bit float formats.
#pragma once

#include "core/program.h"
#include "core/element.h"

namespace einsummable {

// The table of `dtype`, or null when it is no 8-bit float.
const Float8* Float8Table(DType dtype);

}  // namespace einsummable
