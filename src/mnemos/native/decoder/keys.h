// Attention of one query to some of the keys and values that its row may attend to.
#pragma once
#include <cmath>

#include "decoder/decode.h"
#include "decoder/matrix.h"

namespace mnemos {
namespace {

// The entries that rows attend to, listed once per token for all layers and heads.
class Listed {
   public:
    // Memory for the rows: 32-bit numbers.
    static i64 size(const Visible& m, i64 rows) { return rows * (rounded(m.entries, W) + W); }

    Listed() = default;
    Listed(const Visible& m, std::int32_t* memory) : m(m), memory(memory), ld(rounded(m.entries, W) + W) {}

    // Of the rows [from, to). A row that may attend to nothing attends to everything.
    void list(i64 from, i64 to) {
        for (i64 b = from; b < to; b++) {
            std::int32_t* at = memory + b * ld;
            const unsigned char* marks = m.marks ? m.marks + (m.common ? b / m.copies : b) * m.entries : nullptr;
            i64 n = 0;
            for (i64 i = 0; i < m.entries; i++)
                if (!marks || marks[i]) at[1 + n++] = (std::int32_t)i;
            if (!n)
                for (; n < m.entries; n++) at[1 + n] = (std::int32_t)n;
            at[0] = (std::int32_t)n;
        }
    }
    i64 count(i64 row) const { return memory[row * ld]; }
    const std::int32_t* entries(i64 row) const { return memory + row * ld + 1; }

   private:
    Visible m;
    std::int32_t* memory;
    i64 ld;
};

// q·k of D numbers, in lanes; q is 0 behind D up to whole vectors.
ALWAYS V dot(const float* q, const float* k, i64 D) {
    V total = V{};
    i64 i = 0;
    for (; i + W <= D; i += W) total += load<V>(q + i) * load<V>(k + i);
    if (i < D) total += load<V>(q + i) * first(k + i, D - i);
    return total;
}

// The columns [from, from + N·W) of Σ_j p[j]·v[entries[j]] · by; the last ones may be fewer.
template <i64 N>
ALWAYS void weighted(const float* v, i64 ld, const std::int32_t* entries, const float* p, i64 n, i64 from, i64 D,
                     float by, float* y) {
    V total[N];
    for (i64 c = 0; c < N; c++) total[c] = V{};
    bool whole = from + N * W <= D;
    for (i64 j = 0; j < n; j++) {
        const float* row = v + entries[j] * ld + from;
        V weight = all(p[j]);
        for (i64 c = 0; c < N; c++)
            total[c] += weight * (whole ? load<V>(row + c * W) : first(row + c * W, least(W, D - from - c * W)));
    }
    for (i64 c = 0; c < N; c++) {
        V found = total[c] * by;
        std::memcpy(y + from + c * W, &found, least(W, D - from - c * W) * sizeof(float));
    }
}

// y = Σ_j softmax_j(q·k_j)·v_j over n > 0 entries of a head; `scores` has room for n, rounded up to whole vectors.
void attend_to(const float* k, const float* v, i64 ld, const std::int32_t* entries, i64 n, const float* q, i64 D,
               float* scores, float* y) {
    float most = -INFINITY;
    for (i64 j = 0; j < n; j += W) {
        V found[W];
        i64 here = least(W, n - j);
        for (i64 i = 0; i < here; i++) found[i] = dot(q, k + entries[j + i] * ld, D);
        for (i64 i = here; i < W; i++) found[i] = V{};
        sums<W>(found, scores + j);
        for (i64 i = 0; i < here; i++) most = scores[j + i] > most ? scores[j + i] : most;
        for (i64 i = here; i < W; i++) scores[j + i] = -INFINITY;
    }
    V total = V{};
    for (i64 j = 0; j < n; j += W) {
        V p = exponential(load<V>(scores + j) - most);
        store(scores + j, p), total += p;
    }
    float by = 1 / sum(total);
    i64 i = 0;
    for (; i + 4 * W <= D; i += 4 * W) weighted<4>(v, ld, entries, scores, n, i, D, by, y);
    for (; i + 2 * W <= D; i += 2 * W) weighted<2>(v, ld, entries, scores, n, i, D, by, y);
    for (; i < D; i += W) weighted<1>(v, ld, entries, scores, n, i, D, by, y);
}

}  // namespace
}  // namespace mnemos
