/* Which tokens top-k, top-p and min-p leave, without sorting all of them. */
#pragma once

#include <cstdint>

namespace inl {

/* Bins by the upper bits of a number; see sample.cpp. */
constexpr int64_t BINS = 4096;

struct Filter {
    float top_k, top_p, min_p;
    bool neutral() const { return top_k < 1 && top_p >= 1 && min_p <= 0; }
};

/* Bytes of scratch for a vocabulary. */
constexpr int64_t filter_bytes(int64_t count) { return 4 * count + 16 * BINS; }

/* Set mass[t] to 0 where token t is not kept. scaled is at most 0, mass its
 * exponential. */
void keep_likeliest(const float *scaled, float *mass, int64_t count,
                    const Filter &filter, char *scratch);

} // namespace inl
