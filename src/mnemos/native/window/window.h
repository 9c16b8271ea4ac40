// What one call of the kernel of a window, sinks and a state is given: a token, and the buffers of `Ring`.
#pragma once
#include "call.h"

namespace mnemos {

enum Features : i64 { NO_STATE = 0, EXPONENTIAL = 1, HEDGEHOG = 2 };  // window and sinks alone; elu(x) + 1; [e^{Wx − m}, e^{−Wx − m}]

RECORD(WindowToken,
    i64 B, heads, G, D, M, F, window, sinks, place, threads;  // key heads, query heads of each, widths of k, v and φ
    i64 features;
    // A token [B, heads(·G), ·]: `met` is the query that meets the sinks; from_q and from_k are what features are of.
    const float *q, *met, *k, *v, *from_q, *from_k;
    const float *query_map, *key_map, *gamma, *beta;  // [heads·G, F/2, D], [heads, F/2, D], [heads·G], [heads]; null: sums
    // Written: [B, heads, window, D], sinks + window values of M, what features are of (null: the keys), S [F, M], z [F].
    float *keys, *values, *from, *s, *z;
    const float* sink_k;  // [B, heads, sinks, D]
    float* y;             // [B, heads·G, M]
)

struct WindowKernel {
    // Returns 1 where there is no memory. softcap 0: none. kept: the factor of S and z before a token enters them.
    int (*step)(const WindowToken&, double scale, double softcap, double kept);
};

}  // namespace mnemos
