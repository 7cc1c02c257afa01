#include "sample.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "numbers.h"

namespace inl {
namespace {

/* Smaller for likelier tokens: numbers at most 0 fall as their bits rise. */
uint32_t rank_key(float scaled) {
    return scaled == 0 ? 0 : bits_of(scaled) & 0x7fffffff;
}

int64_t bin_of(float scaled) { return rank_key(scaled) >> 19; }

/* The last token that is kept, in the order of falling score and rising id. */
struct Border {
    uint32_t key = std::numeric_limits<uint32_t>::max();
    int32_t id = std::numeric_limits<int32_t>::max();

    bool keeps(uint32_t other, int32_t token) const {
        return (other < key) | ((other == key) & (token <= id));
    }
    Border nearer(const Border &other) const {
        return other.key < key || (other.key == key && other.id < id) ? other : *this;
    }
};

/* Tokens by bins of their score; only a bin with a border in it is ever sorted. */
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

    /* The border behind the first k tokens; total becomes their mass. */
    Border first(float k, double &total) {
        total = 0;
        double left = k < 1 ? double(count_) : double(std::ceil(k));
        for (int64_t bin = 0; bin < BINS; bin++) {
            if (double(counts_[bin]) > left) return inside(sorted(bin), left, total);
            left -= double(counts_[bin]);
            total += masses_[bin];
        }
        return {};
    }

    /* The border behind the tokens before which there is less than the mass. */
    Border until(double mass) {
        double before = 0;
        Border last{0, -1};
        for (int64_t bin = 0; bin < BINS; bin++) {
            if (before + masses_[bin] < mass) {
                before += masses_[bin];
                continue;
            }
            last = Border{uint32_t(bin) << 19, -1};
            const int64_t size = sorted(bin);
            for (int64_t at = 0; at < size; at++) {
                if (before >= mass) return last;
                last = border(order_[at]);
                before += mass_[order_[at]];
            }
        }
        return {};
    }

  private:
    Border border(int32_t token) const { return {rank_key(scaled_[token]), token}; }

    int64_t sorted(int64_t bin) {
        int64_t size = 0;
        for (int64_t token = 0; token < count_; token++)
            if (bin_of(scaled_[token]) == bin) order_[size++] = int32_t(token);
        std::sort(order_, order_ + size, [this](int32_t a, int32_t b) {
            return scaled_[a] != scaled_[b] ? scaled_[a] > scaled_[b] : a < b;
        });
        return size;
    }

    Border inside(int64_t, double left, double &total) {
        for (int64_t at = 0; at < int64_t(left); at++) total += mass_[order_[at]];
        /* With none left the border lies before this bin's first token. */
        if (left < 1) return {rank_key(scaled_[order_[0]]), -1};
        return border(order_[int64_t(left) - 1]);
    }

    const float *scaled_, *mass_;
    int64_t count_;
    double *masses_;
    int64_t *counts_;
    int32_t *order_;
};

} // namespace

void keep_likeliest(const float *scaled, float *mass, int64_t count,
                    const Filter &filter, char *scratch) {
    if (filter.neutral()) return;
    Border border;
    if (filter.top_k >= 1 || !(filter.top_p >= 1)) {
        Ranking ranking(scaled, mass, count, scratch);
        double total;
        border = ranking.first(filter.top_k, total);
        if (!(filter.top_p >= 1))
            border = border.nearer(ranking.until(double(filter.top_p) * total));
    }
    const int64_t likeliest = std::max_element(scaled, scaled + count) - scaled;
    const float most = mass[likeliest];
    for (int64_t token = 0; token < count; token++) {
        const bool kept = border.keeps(rank_key(scaled[token]), int32_t(token));
        mass[token] = kept & (mass[token] >= filter.min_p) ? mass[token] : 0;
    }
    mass[likeliest] = most;
}

} // namespace inl
