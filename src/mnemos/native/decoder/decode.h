// One token through a whole decoder, with linear or softmax attention or a layer that forgets.
#pragma once
#include "call.h"

namespace mnemos {

// The numbers of a weight: float32, bfloat16, or whole numbers of 8 bits that a scale of their row multiplies.
enum class Weights : i64 { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

// y = weight·x + bias of a linear layer (weight [out, in], bias [out] or null, scale [out] or null: 1), or the two
// vectors of a LayerNorm, which are float32, as biases and scales are; an RMSNorm has no bias.
RECORD(Affine,
    const void* weight;
    const float *bias, *scale;
)

// Vectors of a layer that forgets, null for those that it does not have: weights of its convolution [channels, 4] and their
// biases, logarithms of the decays' rates [H] and their biases [H] or [H, D], the skip of Mamba-2 [H], and the scale of the
// norm: of a head [M], of Mamba-2 [H, M].
RECORD(Recurrent,
    const float *convolution, *convolution_biases, *rates, *biases, *skip, *scale;
)

// The second row is of an attention to a source: nulls where there is none. `gate`: of a gated MLP, else null. The last row
// is of layers that forget, with the matrices of decays per channel: from D (GLA: its rank) to [H, D] and from M to [H, M].
RECORD(Layer,
    Affine attention_norm, qkv, output;
    Affine read_norm, query, read_output;
    Affine mlp_norm, gate, expand, contract;
    Affine to_decay, to_gate;
    Recurrent recurrent;
)

enum Position : i64 { NOWHERE = 0, LEARNED = 1, SINUSOIDAL = 2, ROTARY = 3 };
enum Attention : i64 { LINEAR = 0, SOFTMAX = 1, DELTA = 2, GLA = 3, RETENTION = 4, MAMBA2 = 5 };
enum Decay : i64 { NONE = 0, HEAD = 1, CHANNEL = 2 };
enum Activation : i64 { RECTIFY = 0, GELU = 1, SILU = 2 };

RECORD(Stack,
    i64 layers, width, heads, mlp, vocabulary;
    i64 hidden, outputs;  // of the head: width of its hidden layer (0: none), and of the logits
    i64 post, rms;               // norms after the sum; RMSNorm in place of LayerNorm
    i64 activation, gated, map;  // of the MLP; whether its product with a second matrix; φ of linear attention
    i64 position, limit;  // learned positions there are
    i64 weights;          // of all matrices but the embedding, which is float32
    i64 attention, reads;  // of all layers; whether they attend to a source too
    i64 key_heads, key_width, value_width, decay;  // of layers that forget: Hk, D, M
    i64 doubled, rank;                             // whether β is up to 2; of GLA's decays
    const float *embedding, *positions;  // [vocabulary, width], [limit, width]
    const double* frequencies;           // [(width + 1) / 2]; of rotary positions [width / heads / 2]
    const double* turns;                 // of retention's own positions [D / 2]
    Affine final_norm, before_head, head;
)

// Before the token and after it: s [B, H, D, D] and z [B, H, D] of a layer with linear attention; s [B, H, D, M] of one
// that forgets.
RECORD(Sums,
    const float *s, *z;
    float *s_end, *z_end;
)

// Keys and values [G, N, H, D], both with these strides; the last one is 1. The rows of a group are next to each other.
RECORD(Keys,
    float *k, *v;
    i64 group, entry, head;
)

// The last three inputs of a convolution [B, 3, channels], before the token and after it.
RECORD(Window,
    const float* from;
    float* to;
)

// Of a layer. `own`: of softmax attention, with room for this token's entries, one of each row of a group, at the end.
RECORD(Memory,
    Sums sums;
    Keys own, source;
    Window window;
)

// A row attends to the entries of its group whose mark is not 0. marks: [rows, N], or [groups, N] if `common`; null:
// to all.
RECORD(Visible,
    const unsigned char* marks;
    i64 entries, copies, common;  // N, and the rows of a group
)

RECORD(Step,
    i64 rows, threads;
    const i64* tokens;  // [rows], `stride` apart
    i64 stride;
    const i64* seen;  // [rows], tokens before this one; null: none
    float* logits;    // [rows, outputs]
    Visible own, source;
)

// eps of the norms and of linear attention (of layers that forget: of their own norm), and what embeddings are multiplied by.
RECORD(Numbers,
    double norm_eps, attention_eps, embedding;
)

// What a processor's variant offers. `decode` returns 0, or 1 for a token or a position that there is not and for no
// memory; of what is given it writes only into the room in `Memory::own`. `activate`: an activation of n numbers, in
// place.
struct Decoder {
    int (*decode)(const Stack&, const Layer*, const Step&, const Memory*, const Numbers&);
    void (*activate)(i64 activation, float* x, i64 n);
};

}  // namespace mnemos
