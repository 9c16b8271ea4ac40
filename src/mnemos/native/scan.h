// The one loop that all of it is made of: a state X [rows, columns] that takes in outer products and is read out,
//
//     X += p_t ⊗ r_t        out_t = Xᵀ w_t        for one token t after the other, in either direction.
//
//     what      X               rows  columns   p      r      w      direction
//     y·den     S [D, M]        D     M         φ(k)   v      φ(q)   forward
//     dφ(q)     S'ᵀ [M+1, D]    M+1   D         v'     φ(k)   g'     forward
//     dφ(k)     R'ᵀ [M+1, D]    M+1   D         g'     φ(q)   v'     backward
//     dv        R [D, M]        D     M         φ(q)   ĝ      φ(k)   backward
//
// Tokens are taken TILE at a time, so that a piece of X is read and written once for 2·TILE products with it. X lies in
// panels of a few vectors of columns, row after row, and a panel stays in the first cache while a chunk passes by.
#pragma once
#include "vector.h"

namespace mnemos {
namespace {

constexpr i64 TILE = 4;
constexpr i64 PANEL = WIDTH >= 16 ? 2 : 1;  // vectors: 2·TILE·PANEL of them must fit the registers

template <i64 NB, bool READ>
ALWAYS void tile(float* X, i64 rows, const float* p, const float* w, i64 ld, const float* r, float* out, i64 ldr) {
    V in[TILE][NB], read[TILE][NB];
    for (i64 t = 0; t < TILE; t++)
        for (i64 j = 0; j < NB; j++) in[t][j] = load<V>(r + t * ldr + j * W), read[t][j] = V{};
    for (i64 a = 0; a < rows; a++, X += NB * W) {
        V x[NB];
        for (i64 j = 0; j < NB; j++) x[j] = load<V>(X + j * W);
        for (i64 t = 0; t < TILE; t++) {
            V by = all(p[t * ld + a]);
            for (i64 j = 0; j < NB; j++) x[j] += by * in[t][j];
            if (READ) {
                by = all(w[t * ld + a]);
                for (i64 j = 0; j < NB; j++) read[t][j] += by * x[j];
            }
        }
        for (i64 j = 0; j < NB; j++) store(X + j * W, x[j]);
    }
    if (READ)
        for (i64 t = 0; t < TILE; t++)
            for (i64 j = 0; j < NB; j++) store(out + t * ldr + j * W, read[t][j]);
}

// each(first column, width) for every panel; panel c starts at X + rows·c.
template <class Each>
ALWAYS void panels(i64 columns, Each each) {
    for (i64 c = 0, width; c < columns; c += width) {
        width = columns - c >= PANEL * W ? PANEL * W : W;
        each(c, width);
    }
}

template <bool READ>
void scan(float* X, i64 rows, i64 columns, const float* p, const float* w, i64 ld, const float* r, float* out, i64 ldr,
          i64 tokens, bool backwards) {
    i64 first = backwards ? tokens - 1 : 0, step = backwards ? -1 : 1;
    panels(columns, [&](i64 c, i64 width) {
        for (i64 done = 0; done < tokens; done += TILE) {
            i64 t = first + step * done;
            const float *pt = p + t * ld, *wt = w + t * ld, *rt = r + t * ldr + c;
            float* to = out + t * ldr + c;
            if (width == PANEL * W)
                tile<PANEL, READ>(X + rows * c, rows, pt, wt, step * ld, rt, to, step * ldr);
            else
                tile<1, READ>(X + rows * c, rows, pt, wt, step * ld, rt, to, step * ldr);
        }
    });
}

// The same for one token, from s [D, M] to `to` [D, M], where they lie.
void token(const float* s, float* to, i64 D, i64 M, const float* k, const float* q, const float* v, float* out) {
    i64 m = 0;
    for (; m + TILE * W <= M; m += TILE * W) {
        V in[TILE], read[TILE];
        for (i64 j = 0; j < TILE; j++) in[j] = load<V>(v + m + j * W), read[j] = V{};
        for (i64 d = 0; d < D; d++)
            for (i64 j = 0; j < TILE; j++) {
                V x = load<V>(s + d * M + m + j * W) + all(k[d]) * in[j];
                store(to + d * M + m + j * W, x);
                read[j] += all(q[d]) * x;
            }
        for (i64 j = 0; j < TILE; j++) store(out + m + j * W, read[j]);
    }
    for (; m + W <= M; m += W) {
        V in = load<V>(v + m), read = V{};
        for (i64 d = 0; d < D; d++) {
            V x = load<V>(s + d * M + m) + all(k[d]) * in;
            store(to + d * M + m, x);
            read += all(q[d]) * x;
        }
        store(out + m, read);
    }
    for (; m < M; m++) {
        float read = 0;
        for (i64 d = 0; d < D; d++) {
            float x = s[d * M + m] + k[d] * v[m];
            to[d * M + m] = x;
            read += q[d] * x;
        }
        out[m] = read;
    }
}

// X from s [D, M], and back; null is zeros. Columns behind the last one are filled with 0.
void put(float* X, i64 D, i64 M, const float* s) {
    i64 columns = rounded(M, W);
    std::memset(X, 0, D * columns * sizeof(float));
    if (!s) return;
    panels(columns, [&](i64 c, i64 width) {
        for (i64 d = 0; d < D; d++)
            std::memcpy(X + D * c + d * width, s + d * M + c, least(width, M - c) * sizeof(float));
    });
}

void get(const float* X, i64 D, i64 M, float* s) {
    panels(rounded(M, W), [&](i64 c, i64 width) {
        for (i64 d = 0; d < D; d++)
            std::memcpy(s + d * M + c, X + D * c + d * width, least(width, M - c) * sizeof(float));
    });
}

// X' [M + 1, D] from s [D, M] and z [D], and back.
void put_turned(float* X, i64 D, i64 M, const float* s, const float* z) {
    i64 rows = M + 1, columns = rounded(D, W);
    std::memset(X, 0, rows * columns * sizeof(float));
    if (!s) return;
    panels(columns, [&](i64 c, i64 width) {
        for (i64 d = c; d < least(c + width, D); d++) {
            float* to = X + rows * c + d - c;
            for (i64 m = 0; m < M; m++) to[m * width] = s[d * M + m];
            to[M * width] = z[d];
        }
    });
}

void get_turned(const float* X, i64 D, i64 M, float* s, float* z) {
    i64 rows = M + 1;
    panels(rounded(D, W), [&](i64 c, i64 width) {
        for (i64 d = c; d < least(c + width, D); d++) {
            const float* from = X + rows * c + d - c;
            for (i64 m = 0; m < M; m++) s[d * M + m] = from[m * width];
            z[d] = from[M * width];
        }
    });
}

}  // namespace
}  // namespace mnemos
