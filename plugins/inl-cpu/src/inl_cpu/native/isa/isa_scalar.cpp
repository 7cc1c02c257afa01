/* The kernels in plain C++, for any machine. */

#include "isa/isa.h"

#include "kernels/table.h"

namespace inl {

const Operation *scalar_operations() { return TABLE.operations; }

} // namespace inl
