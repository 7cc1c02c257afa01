#include "isa.h"
namespace inl { const Operation *amx_operations() { return nullptr; } }
