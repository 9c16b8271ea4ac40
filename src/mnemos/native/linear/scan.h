// The one loop that all of it is made of: a state X [rows, columns] that takes in outer products and is read out,
//
//     X += p_t ⊗ r_t        out_t = Xᵀ w_t        for one token t after the other, in either direction.
//
//     what      X               rows  columns   p      r      w      direction
//     y·den     S [D, M]        D     M         φ(k)   v      φ(q)   forward
//     dφ(q)     Sᵀ [M, D]       M     D         v      φ(k)   ĝ      forward, and γ·z beside it
//     dφ(k)     R'ᵀ [M+1, D]    M+1   D         g'     φ(q)   v'     backward
//     dv        R [D, M]        D     M         φ(q)   ĝ      φ(k)   backward
//
// Tokens are taken TILE at a time, so that a piece of X is read and written once for 2·TILE products with it. X lies in
// panels of a few vectors of columns, row after row, and a panel stays in the first cache while a chunk passes by.
//
// A sum of a million tokens in float32 loses what is smaller than its last digit, token after token. In the forward,
// whose sums are handed on for ever, every vector of X has a second part beside it, of what X had no digits for (Kahan's
// summation, a tile at a time), and the next tile begins with it. The backward's sums end with the call: PARTS = 1.
#pragma once
#include "simd/vector.h"

namespace mnemos {
namespace {

constexpr i64 TILE = 4;
constexpr i64 PANEL = WIDTH >= 16 ? 2 : 1;  // vectors: 2·TILE·PANEL of them must fit the registers

template <i64 PARTS, i64 NB, bool READ>
ALWAYS void tile(float* X, i64 rows, const float* p, const float* w, i64 ld, const float* r, float* out, i64 ldr) {
    V in[TILE][NB], read[TILE][NB];
    for (i64 t = 0; t < TILE; t++)
        for (i64 j = 0; j < NB; j++) in[t][j] = load<V>(r + t * ldr + j * W), read[t][j] = V{};
    for (i64 a = 0; a < rows; a++, X += PARTS * NB * W) {
        V x[NB], more[NB];
        for (i64 j = 0; j < NB; j++) {
            x[j] = load<V>(X + j * W);
            if (PARTS == 2) more[j] = load<V>(X + (NB + j) * W);
        }
        for (i64 t = 0; t < TILE; t++) {
            V by = all(p[t * ld + a]);
            for (i64 j = 0; j < NB; j++) (PARTS == 2 ? more : x)[j] += by * in[t][j];
            if (READ) {
                by = all(w[t * ld + a]);
                for (i64 j = 0; j < NB; j++) read[t][j] += by * (PARTS == 2 ? x[j] + more[j] : x[j]);
            }
        }
        for (i64 j = 0; j < NB; j++) {
            V now = PARTS == 2 ? x[j] + more[j] : x[j];
            store(X + j * W, now);
            if (PARTS == 2) store(X + (NB + j) * W, more[j] - (now - x[j]));
        }
    }
    if (READ)
        for (i64 t = 0; t < TILE; t++)
            for (i64 j = 0; j < NB; j++) store(out + t * ldr + j * W, read[t][j]);
}

// each(first column, width) for every panel; panel c starts at X + PARTS·rows·c.
template <class Each>
ALWAYS void panels(i64 columns, Each each) {
    for (i64 c = 0, width; c < columns; c += width) {
        width = columns - c >= PANEL * W ? PANEL * W : W;
        each(c, width);
    }
}

template <i64 PARTS, bool READ>
void scan(float* X, i64 rows, i64 columns, const float* p, const float* w, i64 ld, const float* r, float* out, i64 ldr,
          i64 tokens, bool backwards) {
    i64 first = backwards ? tokens - 1 : 0, step = backwards ? -1 : 1;
    panels(columns, [&](i64 c, i64 width) {
        for (i64 done = 0; done < tokens; done += TILE) {
            i64 t = first + step * done;
            const float *pt = p + t * ld, *wt = w + t * ld, *rt = r + t * ldr + c;
            float* to = out + t * ldr + c;
            if (width == PANEL * W)
                tile<PARTS, PANEL, READ>(X + PARTS * rows * c, rows, pt, wt, step * ld, rt, to, step * ldr);
            else
                tile<PARTS, 1, READ>(X + PARTS * rows * c, rows, pt, wt, step * ld, rt, to, step * ldr);
        }
    });
}

// A piece of X of one row, where a token adds by·in.
template <class A>
ALWAYS A grown(const float* s, float* to, A by, A in) {
    A now = load<A>(s) + by * in;
    store(to, now);
    return now;
}

// The same for one token, from s [D, M] to `to` [D, M], where they lie.
inline void token(const float* s, float* to, i64 D, i64 M, const float* k, const float* q, const float* v, float* out) {
    i64 m = 0;
    for (; m + TILE * W <= M; m += TILE * W) {
        V in[TILE], read[TILE];
        for (i64 j = 0; j < TILE; j++) in[j] = load<V>(v + m + j * W), read[j] = V{};
        for (i64 d = 0; d < D; d++)
            for (i64 j = 0, i = d * M + m; j < TILE; j++, i += W)
                read[j] += all(q[d]) * grown(s + i, to + i, all(k[d]), in[j]);
        for (i64 j = 0; j < TILE; j++) store(out + m + j * W, read[j]);
    }
    for (; m + W <= M; m += W) {
        V in = load<V>(v + m), read = V{};
        for (i64 d = 0, i = m; d < D; d++, i += M)
            read += all(q[d]) * grown(s + i, to + i, all(k[d]), in);
        store(out + m, read);
    }
    for (; m < M; m++) {
        float read = 0;
        for (i64 d = 0, i = m; d < D; d++, i += M)
            read += q[d] * grown(s + i, to + i, k[d], v[m]);
        out[m] = read;
    }
}

// X from a matrix [D, M], and back: its numbers (part 0) or what they had no digits for (part 1). Null is zeros.
template <i64 PARTS>
void put(float* X, i64 D, i64 M, const float* s, i64 part) {
    panels(rounded(M, W), [&](i64 c, i64 width) {
        float* to = X + PARTS * D * c + part * width;
        for (i64 d = 0; d < D; d++, to += PARTS * width) {
            std::memset(to, 0, width * sizeof(float));
            if (s) std::memcpy(to, s + d * M + c, least(width, M - c) * sizeof(float));
        }
    });
}

template <i64 PARTS>
void get(const float* X, i64 D, i64 M, float* s, i64 part) {
    panels(rounded(M, W), [&](i64 c, i64 width) {
        const float* from = X + PARTS * D * c + part * width;
        for (i64 d = 0; d < D; d++, from += PARTS * width)
            std::memcpy(s + d * M + c, from, least(width, M - c) * sizeof(float));
    });
}

// X' [M + 1, D] from [D, M] and [D], and back. Without NORM, X' [M, D] from [D, M] alone.
template <i64 PARTS, bool NORM = true>
void put_turned(float* X, i64 D, i64 M, const float* s, const float* z, i64 part) {
    i64 rows = NORM ? M + 1 : M;
    panels(rounded(D, W), [&](i64 c, i64 width) {
        float* to = X + PARTS * rows * c + part * width;
        for (i64 m = 0; m < rows; m++) std::memset(to + m * PARTS * width, 0, width * sizeof(float));
        for (i64 d = c; s && d < least(c + width, D); d++, to++) {
            for (i64 m = 0; m < M; m++) to[m * PARTS * width] = s[d * M + m];
            if (NORM) to[M * PARTS * width] = z[d];
        }
    });
}

template <i64 PARTS>
void get_turned(const float* X, i64 D, i64 M, float* s, float* z, i64 part) {
    i64 rows = M + 1;
    panels(rounded(D, W), [&](i64 c, i64 width) {
        const float* from = X + PARTS * rows * c + part * width;
        for (i64 d = c; d < least(c + width, D); d++, from++) {
            for (i64 m = 0; m < M; m++) s[d * M + m] = from[m * PARTS * width];
            z[d] = from[M * PARTS * width];
        }
    });
}

// x + low + y + y_low as a number and what it had no digits for.
ALWAYS void add(float& x, float& low, float y, float y_low) {
    float sum = x + y, seen = sum - x;
    float more = (x - (sum - seen)) + (y - seen) + (low + y_low);
    x = sum + more;
    low = more - (x - sum);
}

}  // namespace
}  // namespace mnemos
