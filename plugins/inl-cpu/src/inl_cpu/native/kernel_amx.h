/* What AMX does otherwise than AVX-512. */

#include "kernel_amx_linear.h"

#include "kernel_amx_attention.h"

/* The table of AVX-512 with products and attention of its own. */
struct AmxTable {
    Operation operations[INL_OPCODES];

    AmxTable() {
        for (int opcode = 0; opcode < INL_OPCODES; opcode++)
            operations[opcode] = OPERATIONS[opcode];
        operations[INL_LINEAR] = {{amx_encode_chunks, amx_encode_body},
                                  {amx_linear_chunks, amx_linear_body},
                                  amx_linear_scratch};
        operations[INL_ATTENTION] = {{cache_tokens_chunks, cache_tokens_body},
                                     {amx_attention_chunks, amx_attention_body},
                                     amx_attention_scratch,
                                    {amx_gather_chunks, gather_body}};
    }
};
