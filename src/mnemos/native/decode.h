// One token through a whole linear transformer. The order of the fields is that of generate/fused.py, where every one
// of them is a word of 64 bits.
#pragma once
#include <atomic>

#include "call.h"

namespace mnemos {

// The numbers of a weight: float32, bfloat16, or whole numbers of 8 bits that a scale of their row multiplies.
enum Weights : i64 { FULL = 0, HALVED = 1, WHOLE = 2 };

// y = weight·x + bias of a linear layer (weight [out, in], bias [out] or null, scale [out] or null: 1), or the two
// vectors of a LayerNorm, which are float32, as biases and scales are.
struct Affine {
    const void* weight;
    const float *bias, *scale;
};

struct Layer {
    Affine attention_norm, qkv, output, mlp_norm, expand, contract;
};

enum Position : i64 { NOWHERE = 0, LEARNED = 1, SINUSOIDAL = 2 };

struct Stack {
    i64 layers, width, heads, mlp, vocabulary;
    i64 hidden, outputs;  // of the head: width of its hidden layer (0: none), and of the logits
    i64 post, gelu, map;  // norm after the sum; gelu or relu; φ
    i64 position, limit;  // learned positions there are
    i64 weights;          // of all matrices but the embedding, which is float32
    const float *embedding, *positions;  // [vocabulary, width], [limit, width]
    const double* frequencies;           // [(width + 1) / 2]
    Affine final_norm, before_head, head;
};

// Before the token and after it: s [B, H, D, D] and z [B, H, D] of a layer.
struct Sums {
    const float *s, *z;
    float *s_end, *z_end;
};

struct Step {
    i64 rows, threads;
    const i64* tokens;  // [rows], `stride` apart
    i64 stride;
    const i64* seen;  // [rows], tokens before this one; null: none
    float* logits;    // [rows, outputs]
};

// What a processor's variant offers. `decode` returns 0, or 1 for a token or a position that there is not and for no
// memory; nothing that is given is written to. `activate`: gelu (not 0) or relu of n numbers, in place.
struct Decoder {
    int (*decode)(const Stack&, const Layer*, const Step&, const Sums*, double norm_eps, double attention_eps);
    void (*activate)(bool gelu, float* x, i64 n);
};

// work(context, worker, workers) by `workers` <= threads at the same time, so that they may wait for each other.
void together(i64 threads, void (*work)(void*, i64, i64), void* context);

// Where all workers wait for the last of them. In turn with others on a processor, waiting must not keep them from it.
struct Barrier {
    std::atomic<i64> arrived{0}, passed{0};
    void wait(i64 workers);
};

}  // namespace mnemos
