#include "isa.h"
namespace inl { const Operation *neon_operations() { return nullptr; } }
