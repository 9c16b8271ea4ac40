// How the tokens of one pass over a sequence are cut into units of work.
#pragma once
#include "linear/bidirectional.h"
#include "simd/vector.h"

namespace mnemos {
namespace {

constexpr i64 CHUNK = 32;           // tokens: few, so that those of the next chunk, asked for early, fit the cache too
constexpr i64 SEGMENT_LEAST = 256;  // tokens that make a segment worth its sums

// How the tokens of one pass are cut: `segments` of `length` tokens, `groups` of `heads` heads.
struct Cut {
    i64 segments, length, groups, heads;

    Cut(const Everything& c, i64 tokens, i64 workers) {
        i64 wanted = workers > 1 ? (4 * workers + c.B - 1) / c.B : 1;
        segments = least(wanted, tokens / SEGMENT_LEAST);
        segments = segments < 1 ? 1 : segments;
        length = rounded((tokens + segments - 1) / segments, CHUNK);
        segments = tokens ? (tokens + length - 1) / length : 1;
        groups = least(c.H, (wanted + segments - 1) / segments);
        heads = (c.H + groups - 1) / groups;
        groups = (c.H + heads - 1) / heads;
    }
    i64 units(i64 rows) const { return rows * segments * groups; }
};

// A unit: tokens [t0, t1) of heads [h0, h1) of row b.
struct Part {
    i64 b, segment, h0, h1, t0, t1;

    Part(const Cut& cut, i64 index, i64 heads, i64 tokens) {
        h0 = index % cut.groups * cut.heads, h1 = least(h0 + cut.heads, heads), index /= cut.groups;
        segment = index % cut.segments, b = index / cut.segments;
        t0 = segment * cut.length, t1 = least(t0 + cut.length, tokens);
    }
};

}  // namespace
}  // namespace mnemos
