/* Why an instruction is refused, before anything runs. */

#include "matrix.h"

namespace inl {
namespace {

const char *matrix_refusal(const inl_matrix *m) {
    if (m == nullptr) return "matrix: missing";
    if (m->rows < 1 || m->columns < 1)
        return "matrix: rows and columns must be positive";
    if (m->data == nullptr) return "matrix: it has no data";
    if (m->format == INL_F32 || m->format == INL_BF16) return nullptr;
    if (m->format != INL_U4 && m->format != INL_U8)
        return "matrix: accepted formats are F32, BF16, U4 and U8";
    if (m->group != 16 && m->group != 32)
        return "matrix: accepted groups are 16 and 32";
    if (m->columns % m->group) return "matrix: columns must be whole groups";
    if (m->scale != INL_F16 && m->scale != INL_F32)
        return "matrix: accepted scales are F16 and F32";
    if (m->zero < 0 || m->zero > (m->format == INL_U4 ? 15 : 255))
        return "matrix: zero must be one of its codes";
    if (m->middle < 0 || m->middle > (m->format == INL_U4 ? 15 : 255))
        return "matrix: middle must be one of its codes";
    return nullptr;
}

bool has(const inl_instruction &i, int from, int to) {
    for (int index = from; index <= to; index++)
        if (i.data[index] == nullptr) return false;
    return true;
}

/* Data 0 .. last must be there; dims 0 .. dims - 1 must not be negative. */
const char *basics(const inl_instruction &i, int dims, int last) {
    for (int index = 0; index < dims; index++)
        if (i.dims[index] < 0) return "dims: must not be negative";
    return has(i, 0, last) ? nullptr : "data: a pointer is missing";
}

const char *linear_refusal(const inl_instruction &i) {
    if (const char *why = basics(i, 3, 1)) return why;
    const inl_matrix *m = data<inl_matrix>(i, 1);
    if (const char *why = matrix_refusal(m)) return why;
    if (i.data[3] == nullptr) return "linear: y is missing";
    const int gate = i.flags & INL_GATE_MASK, mode = i.flags & INL_X_MASK;
    if (gate == INL_GATE_MASK) return "linear: one activation at a time";
    if (gate && (i.data[2] || m->rows % (2 * INL_LANES) || i.dims[3] * 2 > m->rows))
        return "linear: a gate takes whole pairs of tiles, fewer columns and no bias";
    if (is_quantized(*m) ? mode == INL_X_BF16
                         : mode == INL_X_INT8 || mode == INL_X_INT16)
        return "linear: integer x is for quantized weights, bfloat16 x for plain ones";
    if (i.data[4] && (!i.data[5] || !i.data[6]))
        return "linear: adding delta takes a norm weight and a place for the sum";
    if (i.data[4] && (i.data[6] == i.data[0] || i.data[6] == i.data[4]))
        return "linear: the sum must be neither x nor delta";
    return nullptr;
}

const char *kinds_refusal(const inl_instruction &i) {
    const bool both = i.flags & INL_KV_BF16 && i.flags & INL_KV_INT8;
    return both ? "cache: it holds bfloat16 or int8" : nullptr;
}

const char *attention_refusal(const inl_instruction &i) {
    if (const char *why = basics(i, 10, 0)) return why;
    if (!has(i, 3, 10)) return "attention: a pointer is missing";
    if (i.data[1] && !(i.data[2] && i.data[11]))
        return "attention: k without v or writes";
    if (!i.data[12] != !i.data[13]) return "attention: cos without sin";
    if (i.dims[2] < 1 || i.dims[1] % i.dims[2])
        return "attention: heads must be a multiple of kv heads";
    if (i.dims[3] < 2 || i.dims[3] % 2) return "attention: head width must be even";
    if (i.dims[4] < 1) return "attention: block size must be positive";
    return kinds_refusal(i);
}

const char *cache_refusal(const inl_instruction &i, int size, int width) {
    if (i.dims[width] < 2 || i.dims[width] % 2) return "cache: head width must be even";
    if (i.dims[size] < 1) return "cache: block size must be positive";
    return kinds_refusal(i);
}

const char *choose_refusal(const inl_instruction &i) {
    if (const char *why = basics(i, 4, 1)) return why;
    if (i.dims[1] < 1 || i.dims[1] > 1 << 30)
        return "choose: accepted are 1 to 2^30 ids";
    if (i.dims[3] < 1 || i.dims[0] % i.dims[3])
        return "choose: samples are not whole rows";
    if (!i.data[2] != !i.data[3]) return "choose: slots without last";
    if ((i.flags & INL_SAMPLE_MASK) == INL_SAMPLE_MASK) return "choose: one sampler";
    if ((i.flags & INL_SAMPLE_MASK) && !has(i, 2, 5))
        return "choose: sampling takes slots, last, parameters and uniforms";
    return nullptr;
}

const char *pack_refusal(const inl_instruction &i) {
    if (const char *why = basics(i, 4, 1)) return why;
    const inl_matrix *m = data<inl_matrix>(i, 1);
    if (const char *why = matrix_refusal(m)) return why;
    if (m->columns != i.dims[1]) return "pack: columns differ from the matrix's";
    if (inl_source_bytes(int32_t(i.dims[3]), i.dims[1]) < 0)
        return "pack: kind unknown, or columns are not whole blocks of it";
    inl_matrix wanted = *m;
    inl_packing(int32_t(i.dims[3]), &wanted);
    const bool plain = m->format <= INL_BF16 && wanted.format <= INL_BF16;
    const bool same = m->format == wanted.format && m->group == wanted.group &&
                      m->zero == wanted.zero && m->scale == wanted.scale &&
                      m->offsets == wanted.offsets;
    if (!plain && !same) return "pack: the matrix is not what the kind packs into";
    const int64_t rows = i.dims[0];
    const int64_t last =
        i.flags & INL_INTERLEAVE
            ? (rows - 1) / INL_LANES * 2 * INL_LANES + (rows - 1) % INL_LANES
            : rows - 1;
    return i.dims[2] + last >= m->rows ? "pack: rows go beyond the matrix" : nullptr;
}

} // namespace

const char *refusal(const inl_instruction &i) {
    switch (i.opcode) {
    case INL_ZERO: return basics(i, 1, 0);
    case INL_COPY: return basics(i, 4, 1);
    case INL_ADD:
    case INL_SUB:
    case INL_MUL: return basics(i, 1, 2);
    case INL_SCALE:
    case INL_READ: return basics(i, 1, 1);
    case INL_EMBEDDING:
        if (const char *why = basics(i, 2, 2)) return why;
        return matrix_refusal(data<inl_matrix>(i, 1));
    case INL_RMS_NORM:
        if (i.data[2] == nullptr) return "rms_norm: y is missing";
        return basics(i, 5, 0);
    case INL_ADD_NORM: return basics(i, 2, 4);
    case INL_LINEAR: return linear_refusal(i);
    case INL_GATED:
        if (!(i.flags & INL_GATE_MASK)) return "gated: it takes an activation";
        return basics(i, 5, 2);
    case INL_ROPE: return basics(i, 5, 3);
    case INL_ROPE_TABLE: return basics(i, 2, 3);
    case INL_ATTENTION: return attention_refusal(i);
    case INL_WRITE_KV:
        if (const char *why = basics(i, 5, 4)) return why;
        return cache_refusal(i, 3, 2);
    case INL_READ_CACHE:
    case INL_FILL_CACHE:
    case INL_COPY_BLOCKS:
        if (const char *why = basics(i, 5, 3)) return why;
        return cache_refusal(i, 1, 3);
    case INL_TAKE_ROWS: return basics(i, 4, 2);
    case INL_CHOOSE: return choose_refusal(i);
    case INL_PENALIZE: return basics(i, 4, 5);
    case INL_PACK: return pack_refusal(i);
    default: return "opcode: unknown";
    }
}

} // namespace inl
