/* Top-k, top-p and min-p filtering without sorting the whole vocabulary. */
#pragma once

#include <cstdint>

namespace inl {

/* Histogram bins by the upper bits of a score. */
constexpr int64_t BINS = 4096;

struct Filter {
    float top_k, top_p, min_p;
    bool neutral() const { return top_k < 1 && top_p >= 1 && min_p <= 0; }
};

/* Scratch bytes for a vocabulary. */
constexpr int64_t filter_bytes(int64_t count) { return 4 * count + 16 * BINS; }

/* Set mass[t] to 0 for each token t that the filter removes. scaled is at most 0, and
 * mass is its exponential. */
void filter_tokens(const float *scaled, float *mass, int64_t count,
                   const Filter &filter, char *scratch);

} // namespace inl
