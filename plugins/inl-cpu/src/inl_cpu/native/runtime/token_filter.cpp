#include "runtime/token_filter.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/numbers.h"

namespace inl {
namespace {

/* A sort key, smaller for higher scores: of numbers <= 0 the bits rise as they fall. */
uint32_t rank_key(float scaled) {
    return scaled == 0 ? 0 : bits_of(scaled) & 0x7fffffff;
}

int64_t bin_of(float scaled) { return rank_key(scaled) >> 19; }

/* The last token to keep, in order of descending score and ascending id. */
struct Cutoff {
    uint32_t key = std::numeric_limits<uint32_t>::max();
    int32_t id = std::numeric_limits<int32_t>::max();

    bool includes(uint32_t other, int32_t token) const {
        return (other < key) | ((other == key) & (token <= id));
    }
    Cutoff stricter(const Cutoff &other) const {
        return other.key < key || (other.key == key && other.id < id) ? other : *this;
    }
};

/* Histogram of the scores; only a bin that contains a cutoff is sorted. */
class Ranking {
  public:
    Ranking(const float *scaled, const float *mass, int64_t count, char *scratch)
        : scaled_(scaled), mass_(mass), count_(count),
          masses_(reinterpret_cast<double *>(scratch)),
          counts_(reinterpret_cast<int64_t *>(masses_ + BINS)),
          order_(reinterpret_cast<int32_t *>(counts_ + BINS)) {
        std::fill(masses_, masses_ + BINS, 0.0);
        std::fill(counts_, counts_ + BINS, 0);
        for (int64_t token = 0; token < count; token++) {
            masses_[bin_of(scaled[token])] += mass[token];
            counts_[bin_of(scaled[token])]++;
        }
    }

    /* The cutoff after the first k tokens; sets total to their mass. */
    Cutoff top_k(float k, double &total) {
        total = 0;
        double left = k < 1 ? double(count_) : double(std::ceil(k));
        for (int64_t bin = 0; bin < BINS; bin++) {
            if (double(counts_[bin]) > left)
                return within_bin(sort_bin(bin), left, total);
            left -= double(counts_[bin]);
            total += masses_[bin];
        }
        return {};
    }

    /* The cutoff of the smallest set of top tokens with at least this mass. */
    Cutoff top_mass(double mass) {
        double before = 0;
        Cutoff last{0, -1};
        for (int64_t bin = 0; bin < BINS; bin++) {
            if (before + masses_[bin] < mass) {
                before += masses_[bin];
                continue;
            }
            last = Cutoff{uint32_t(bin) << 19, -1};
            const int64_t size = sort_bin(bin);
            for (int64_t at = 0; at < size; at++) {
                if (before >= mass) return last;
                last = cutoff(order_[at]);
                before += mass_[order_[at]];
            }
        }
        return {};
    }

  private:
    Cutoff cutoff(int32_t token) const { return {rank_key(scaled_[token]), token}; }

    int64_t sort_bin(int64_t bin) {
        int64_t size = 0;
        for (int64_t token = 0; token < count_; token++)
            if (bin_of(scaled_[token]) == bin) order_[size++] = int32_t(token);
        std::sort(order_, order_ + size, [this](int32_t a, int32_t b) {
            return scaled_[a] != scaled_[b] ? scaled_[a] > scaled_[b] : a < b;
        });
        return size;
    }

    Cutoff within_bin(int64_t, double left, double &total) {
        for (int64_t at = 0; at < int64_t(left); at++) total += mass_[order_[at]];
        /* With nothing left the cutoff precedes the first token of this bin. */
        if (left < 1) return {rank_key(scaled_[order_[0]]), -1};
        return cutoff(order_[int64_t(left) - 1]);
    }

    const float *scaled_, *mass_;
    int64_t count_;
    double *masses_;
    int64_t *counts_;
    int32_t *order_;
};

} // namespace

void filter_tokens(const float *scaled, float *mass, int64_t count,
                   const Filter &filter, char *scratch) {
    if (filter.neutral()) return;
    Cutoff cutoff;
    if (filter.top_k >= 1 || !(filter.top_p >= 1)) {
        Ranking ranking(scaled, mass, count, scratch);
        double total;
        cutoff = ranking.top_k(filter.top_k, total);
        if (!(filter.top_p >= 1))
            cutoff = cutoff.stricter(ranking.top_mass(double(filter.top_p) * total));
    }
    const int64_t top = std::max_element(scaled, scaled + count) - scaled;
    const float top_mass = mass[top];
    for (int64_t token = 0; token < count; token++) {
        const bool included = cutoff.includes(rank_key(scaled[token]), int32_t(token));
        mass[token] = included & (mass[token] >= filter.min_p) ? mass[token] : 0;
    }
    mass[top] = top_mass;
}

} // namespace inl
