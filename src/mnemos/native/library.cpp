// The C interface: which variant of the kernels runs.
#include <sys/mman.h>

#include <cstring>
#include <initializer_list>

#include "linear/bidirectional.h"
#include "gated_cache/cache.h"
#include "convolution/convolution.h"
#include "decoder/decode.h"
#include "delta/delta.h"
#include "simd/flush.h"
#include "selective/selective.h"
#include "softmax/softmax.h"
#include "decoder/token.h"
#include "window/window.h"

namespace mnemos {

// The tables of a source that is compiled once for each kind of processor, and that of a number of `mnemos_best`. The
// last kind has a table of its own for linear attention that is not causal.
#ifdef X86_VARIANTS
#define VARIANTS(TABLE, SPACE)                                                                           \
    namespace SPACE {                                                                                    \
    extern const TABLE baseline, avx2, avx512;                                                           \
    static const TABLE& of(int variant) { return variant >= 2 ? avx512 : variant == 1 ? avx2 : baseline; } \
    }
#else
#define VARIANTS(TABLE, SPACE)                            \
    namespace SPACE {                                     \
    extern const TABLE baseline;                          \
    static const TABLE& of(int) { return baseline; }      \
    }
#endif

VARIANTS(Kernels, causal)
VARIANTS(Bidirectional, bidirectional)
VARIANTS(Decoder, decoder)
VARIANTS(Cache, gated_cache)
VARIANTS(DeltaRule, delta_rule)
VARIANTS(ShortConvolution, convolution)
VARIANTS(SelectiveScan, selective)
VARIANTS(SoftmaxAttention, softmax)
VARIANTS(TokenKernel, token)
VARIANTS(WindowKernel, window_state)
#ifdef BFLOAT16_VARIANT
namespace bidirectional {
extern const Bidirectional avx512bf16;
}
#endif

}  // namespace mnemos

using mnemos::Call;
using mnemos::i64;

namespace {

[[maybe_unused]] constexpr i64 LARGE = 4 << 20;  // bytes

// An output of many megabytes is mapped afresh, and to map it 4 KiB at a time would take as long as to compute it.
void in_large_pages(const void* data, i64 size) {
#ifdef MADV_HUGEPAGE
    constexpr std::uintptr_t page = 1 << 21;
    std::uintptr_t start = ((std::uintptr_t)data + page - 1) / page * page;
    std::uintptr_t end = ((std::uintptr_t)data + size) / page * page;
    if (size >= LARGE && end > start) madvise((void*)start, end - start, MADV_HUGEPAGE);  // a wish: it may fail
#endif
}

// `width` numbers a token and head, contiguous, as all outputs are.
template <class Call>
void in_large_pages(const Call& c, const mnemos::Rows& x, i64 tokens, i64 width) {
    in_large_pages(x.data, c.B * tokens * c.H * width * (c.type == mnemos::FLOAT32 ? 4 : 2));
}

const mnemos::Bidirectional& bidirectional_of(int variant) {
#ifdef BFLOAT16_VARIANT
    if (variant == 3) return mnemos::bidirectional::avx512bf16;
#endif
    return mnemos::bidirectional::of(variant);
}

// The records that Python packs, by name.
constexpr struct {
    const char *name, *fields;
} RECORDS[] = {
#define FIELDS(NAME) {#NAME, mnemos::NAME##_fields},
    FIELDS(Rows) FIELDS(Marks) FIELDS(Gates) FIELDS(Part) FIELDS(Linear) FIELDS(LinearGradient) FIELDS(Tokens)
    FIELDS(Affine) FIELDS(Recurrent) FIELDS(Sums) FIELDS(Keys) FIELDS(Window) FIELDS(Visible)
    FIELDS(Call) FIELDS(Everything) FIELDS(Delta) FIELDS(Convolution) FIELDS(Selective) FIELDS(Softmax) FIELDS(Token)
    FIELDS(Norm) FIELDS(WindowToken) FIELDS(Update) FIELDS(Reading) FIELDS(Stack) FIELDS(Layer) FIELDS(Step) FIELDS(Memory)
    FIELDS(Numbers)
#undef FIELDS
};

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// The fingerprint of the sources this was built from.
const char* mnemos_sources() { return SOURCES; }

// The text of a record's fields, or null.
const char* mnemos_fields(const char* name) {
    for (auto& record : RECORDS)
        if (!std::strcmp(record.name, name)) return record.fields;
    return nullptr;
}

// The best variant this processor can run: 0 baseline, 1 AVX2, 2 AVX-512, 3 with products of bfloat16 (AVX512-BF16).
int mnemos_best() {
#ifdef X86_VARIANTS
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
#ifdef BFLOAT16_VARIANT
        if (__builtin_cpu_supports("avx512bf16")) return 3;
#endif
        return 2;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
    return 0;
}

int mnemos_forward(int variant, const Call* call, double eps) {
    mnemos::Flush flush;
    in_large_pages(*call, call->y, call->T, call->M);
    if (call->den) in_large_pages(call->den, call->B * call->T * call->H * (i64)sizeof(float));
    return mnemos::causal::of(variant).forward(*call, eps);
}

int mnemos_backward(int variant, const Call* call) {
    mnemos::Flush flush;
    in_large_pages(*call, call->dq, call->T, call->D), in_large_pages(*call, call->dk, call->T, call->D);
    in_large_pages(*call, call->dv, call->T, call->M);
    return mnemos::causal::of(variant).backward(*call);
}

int mnemos_bidirectional(int variant, int backward, const mnemos::Everything* call, double eps) {
    mnemos::Flush flush;
    if (backward) {
        in_large_pages(*call, call->dq, call->T, call->D), in_large_pages(*call, call->dk, call->N, call->D);
        in_large_pages(*call, call->dv, call->N, call->M);
    } else {
        in_large_pages(*call, call->y, call->T, call->M);
    }
    return bidirectional_of(variant).run(*call, eps, backward);
}

int mnemos_decode(int variant, const mnemos::Stack* stack, const mnemos::Layer* layers, const mnemos::Step* step,
                  const mnemos::Memory* memory, const mnemos::Numbers* numbers) {
    mnemos::Flush flush;
    return mnemos::decoder::of(variant).decode(*stack, layers, *step, memory, *numbers);
}

// Of a gated cache: what 0 the update, 1 its backward, 2 the read, 3 its backward.
int mnemos_cache(int variant, int what, const void* call) {
    mnemos::Flush flush;
    const mnemos::Cache& found = mnemos::gated_cache::of(variant);
    if (what < 2) return (what ? found.update_backward : found.update)(*(const mnemos::Update*)call);
    return (what == 2 ? found.read : found.read_backward)(*(const mnemos::Reading*)call);
}

int mnemos_delta(int variant, int backward, const mnemos::Delta* call, double scale) {
    mnemos::Flush flush;
    const mnemos::Delta& c = *call;
    if (backward) {
        in_large_pages(c.dv.data, c.B * c.T * c.H * c.M * (c.type == mnemos::FLOAT32 ? 4 : 2));
        i64 size = c.type == mnemos::FLOAT32 || c.heads < c.H ? 4 : 2;
        for (const void* x : {c.dq.data, c.dk.data}) in_large_pages(x, c.B * c.T * c.heads * c.D * size);
        return mnemos::delta_rule::of(variant).backward(c, scale);
    }
    in_large_pages(c, c.y, c.T, c.M);
    if (c.states) in_large_pages(c.states, c.B * c.H * ((c.T - 1) / c.keep) * c.D * c.M * (i64)sizeof(float));
    return mnemos::delta_rule::of(variant).forward(c, scale);
}

int mnemos_convolution(int variant, int backward, const mnemos::Convolution* call) {
    mnemos::Flush flush;
    const mnemos::Convolution& c = *call;
    in_large_pages((backward ? c.dx : c.y).data, c.B * c.T * c.C * (c.type == mnemos::FLOAT32 ? 4 : 2));
    return (backward ? mnemos::convolution::of(variant).backward : mnemos::convolution::of(variant).forward)(c);
}

int mnemos_selective(int variant, int backward, const mnemos::Selective* call) {
    mnemos::Flush flush;
    const mnemos::Selective& c = *call;
    in_large_pages((backward ? c.dx : c.y).data, c.B * c.T * c.C * (c.type == mnemos::FLOAT32 ? 4 : 2));
    if (backward) in_large_pages(c.d_dt, c.B * c.T * c.C * (i64)sizeof(float));
    return (backward ? mnemos::selective::of(variant).backward : mnemos::selective::of(variant).forward)(c);
}

int mnemos_softmax(int variant, int backward, const mnemos::Softmax* call, double scale) {
    mnemos::Flush flush;
    const mnemos::Softmax& c = *call;
    if (!backward) {
        in_large_pages(c.y.data, c.B * c.T * c.H * c.M * (i64)sizeof(float));
        return mnemos::softmax::of(variant).forward(c, scale);
    }
    in_large_pages(c.dq.data, c.B * c.T * c.H * c.D * (i64)sizeof(float));
    in_large_pages(c.dk.data, c.parts * c.B * c.S * c.heads * c.D * (i64)sizeof(float));
    in_large_pages(c.dv.data, c.parts * c.B * c.S * c.heads * c.M * (i64)sizeof(float));
    return mnemos::softmax::of(variant).backward(c, scale);
}

int mnemos_token(int variant, const mnemos::Token* call, double beta, double eps) {
    mnemos::Flush flush;
    return mnemos::token::of(variant).run(*call, beta, eps);
}

void mnemos_norm(int variant, const mnemos::Norm* call, double offset, double eps) {
    mnemos::Flush flush;
    mnemos::token::of(variant).norm(*call, offset, eps);
}

int mnemos_window(int variant, const mnemos::WindowToken* call, double scale, double softcap, double kept) {
    mnemos::Flush flush;
    return mnemos::window_state::of(variant).step(*call, scale, softcap, kept);
}

void mnemos_activate(int variant, int activation, float* x, i64 n) {
    mnemos::decoder::of(variant).activate(activation, x, n);
}

void mnemos_map(int variant, const float* x, float* y, i64 n, i64 map) { mnemos::causal::of(variant).map(x, y, n, map); }
}
#pragma GCC visibility pop
