// A token of a recurrent layer between its projections, for one kind of processor (WIDTH floats a vector, table VARIANT):
// the short convolution with silu, the gates, the gated delta rule or Mamba-2's scan, and the gated norm of the outputs.
//
// A row's convolution comes first; then a worker takes a head of a row.
#include "decoder/token.h"

#include <cmath>
#include <memory>

#include "simd/activation.h"
#include "delta/token.h"
#include "simd/product.h"
#include "threads.h"

namespace mnemos {
namespace {

constexpr i64 SERIAL = 1 << 16;    // numbers of states below which other threads are not worth waking
constexpr float EPS = 1e-6f;       // added to the squared length of a query or key

ALWAYS float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }
ALWAYS float logistic(float x) { return 1.0f / (1.0f + std::exp(-x)); }

struct Run {
    const Token& c;
    float beta, eps;
    i64 share, ldd, ldm, ldc, each, workers;
    std::unique_ptr<Memory> block;
    float* inputs;  // [B, ldc], after the convolution

    Run(const Token& c, double beta, double eps) : c(c), beta((float)beta), eps((float)eps), share(c.H / c.heads) {
        workers = c.B * c.H * c.D * c.M < SERIAL ? 1 : least(c.threads, c.B * c.H);
        ldd = rounded(c.D, W), ldm = rounded(c.M, W), ldc = rounded(c.C, W);
        each = 5 * ldd + 2 * ldm;
        block = std::make_unique<Memory>(c.B * ldc + workers * each);
        inputs = block->numbers();
    }

    void convolve(i64 b) const {
        float* out = inputs + b * ldc;
        part(c.q, b, c.at_q, c.D, out), part(c.k, b, c.at_k, c.D, out), part(c.v, b, c.at_v, share * c.M, out);
        for (i64 i = c.C; i < ldc; i++) out[i] = 0;
        for (i64 i = 0; i < ldc; i += W) {
            V x = load<V>(out + i);
            store(out + i, x * logistic(x));
        }
    }
    void part(const Part& from, i64 b, i64 first, i64 n, float* out) const {
        if (c.K == 4 && c.W == 4)
            shift<4, 4>(from, b, first, n, out);
        else
            shift<0, 0>(from, b, first, n, out);
    }
    // WINDOW and TAPS are c.K and c.W, or 0.
    template <i64 WINDOW, i64 TAPS>
    void shift(const Part& from, i64 b, i64 first, i64 n, float* out) const {
        const i64 K = WINDOW ? WINDOW : c.K, taps = TAPS ? TAPS : c.W;
        for (i64 h = 0; h < c.heads; h++) {
            const float* x = from.data + b * from.b + h * from.h;
            i64 at = first + h * n;
            float* window = c.window + (b * c.C + at) * K;
            for (i64 i = 0; i < n; i++, at++, window += K) {
                const float* weight = c.weight + at * taps;
                float sum = c.bias ? c.bias[at] : 0;
                for (i64 j = 0; j + 1 < K; j++) window[j] = window[j + 1];
                window[K - 1] = x[i];
                for (i64 j = 0; j < taps; j++) sum += weight[j] * window[K - taps + j];
                out[at] = sum;
            }
        }
    }

    float gate(const Part& from, i64 b, i64 h) const {
        return from.data[b * from.b + h / share * from.h + h % share];
    }

    // A row of n numbers, padded with zeros to a multiple of W, times `by`.
    void row(float* to, const float* from, i64 n, i64 ld, float by) const {
        for (i64 i = 0; i < n; i++) to[i] = by * from[i];
        for (i64 i = n; i < ld; i++) to[i] = 0;
    }
    float length(const float* x, i64 n) const {
        float sum = EPS;
        for (i64 i = 0; i < n; i++) sum += x[i] * x[i];
        return 1.0f / std::sqrt(sum);
    }

    void delta(i64 b, i64 h, float* room) const {
        float *q = room, *k = q + ldd, *decay = k + ldd, *from_q = decay + ldd, *from_k = from_q + ldd;
        float *v = from_k + ldd, *out = v + ldm;
        const float* x = inputs + b * ldc;
        const float *xq = x + c.at_q + h / share * c.D, *xk = x + c.at_k + h / share * c.D;
        row(q, xq, c.D, ldd, length(xq, c.D) / std::sqrt((float)c.D)), row(k, xk, c.D, ldd, length(xk, c.D));
        row(v, x + c.at_v + h * c.M, c.M, ldm, 1);
        float strength = beta * logistic(gate(c.b, b, h));
        if (c.decay)
            row(decay, c.decay + (b * c.H + h) * c.D, c.D, ldd, 1);
        else
            row(decay, decay, 0, ldd, 0);
        V same = all(c.decay ? 0 : -std::exp(c.rate[h]) * softplus(gate(c.a, b, h) + c.shift[h])), dot = V{};
        for (i64 d = 0; d < ldd; d += W) {
            V by = exponential(load<V>(decay + d) + same), vq = load<V>(q + d), vk = load<V>(k + d);
            dot += vq * vk;
            store(decay + d, by), store(from_q + d, by * vq), store(from_k + d, by * vk);
        }
        float dots = sum(dot), *s = c.s + (b * c.H + h) * c.D * c.M;
        one_by_one(Few{1, ldd, ldm, true, k, decay, from_q, from_k, v, &strength, &dots, out}, c.D, c.M, s, s);
        float* y = c.y + (b * c.H + h) * c.M;
        if (!c.norm) return void(std::memcpy(y, out, c.M * sizeof(float)));
        float squares = 0;
        for (i64 m = 0; m < c.M; m++) squares += out[m] * out[m];
        float by = 1.0f / std::sqrt(squares / c.M + eps);
        row(v, c.z.data + b * c.z.b + h / share * c.z.h + h % share * c.M, c.M, ldm, 1);
        for (i64 m = 0; m < ldm; m += W) {
            V z = load<V>(v + m), open = logistic(z);
            store(v + m, c.sigmoid ? open : z * open);
        }
        for (i64 m = 0; m < c.M; m++) y[m] = c.norm[m] * (by * out[m]) * v[m];
    }

    void scan(i64 b, i64 h, float* room) const {
        float *q = room, *k = q + ldd;
        const float *x = inputs + b * ldc, *values = x + c.at_v + h * c.M;
        row(q, x + c.at_q + h / share * c.D, c.D, ldd, 1), row(k, x + c.at_k + h / share * c.D, c.D, ldd, 1);
        float step = softplus(gate(c.a, b, h) + c.shift[h]), decay = std::exp(-std::exp(c.rate[h]) * step);
        float *s = c.s + (b * c.H + h) * c.M * c.D, *y = c.y + (b * c.H + h) * c.M;
        for (i64 m = 0; m < c.M; m++, s += c.D) {
            float u = step * values[m], rest = 0;
            V dot = V{};
            i64 d = 0;
            for (; d + W <= c.D; d += W) {
                V now = decay * load<V>(s + d) + u * load<V>(k + d);
                store(s + d, now), dot += now * load<V>(q + d);
            }
            for (; d < c.D; d++) s[d] = decay * s[d] + u * k[d], rest += s[d] * q[d];
            y[m] = sum(dot) + rest + (c.skip ? c.skip[h] * values[m] : 0);
        }
    }

    void normalise(i64 b) const {
        float* y = c.y + b * c.H * c.M;
        const float* z = c.z.data + b * c.z.b;
        for (i64 i = 0; i < c.H * c.M; i += c.group) {
            float squares = 0;
            i64 j = i, end = i + c.group;
            for (; j + W <= end; j += W) {
                V x = load<V>(z + j);
                store(y + j, load<V>(y + j) * (x * logistic(x)));
            }
            for (; j < end; j++) y[j] *= z[j] * logistic(z[j]);
            for (j = i; j < end; j++) squares += y[j] * y[j];
            float by = 1.0f / std::sqrt(squares / c.group + eps);
            for (j = i; j < end; j++) y[j] *= by * c.norm[j];
        }
    }

    static void head(void* context, i64 unit, i64 worker) {
        const Run& run = *(const Run*)context;
        float* room = run.inputs + run.c.B * run.ldc + worker * run.each;
        i64 b = unit / run.c.H, h = unit % run.c.H;
        if (run.c.scan)
            run.scan(b, h, room);
        else
            run.delta(b, h, room);
    }
    int run() {
        if (!inputs) return 1;
        for (i64 b = 0; b < c.B; b++) convolve(b);
        parallel(workers, c.B * c.H, head, this);
        for (i64 b = 0; b < c.B && c.scan && c.norm; b++) normalise(b);
        return 0;
    }
};

int run(const Token& c, double beta, double eps) { return Run(c, beta, eps).run(); }

struct Norms {
    const Norm& c;
    float offset, eps;
    i64 each;  // rows of a unit

    static void some(void* context, i64 unit, i64) {
        const Norms& self = *(const Norms*)context;
        i64 first = unit * self.each;
        for (i64 i = first; i < least(first + self.each, self.c.rows); i++) self.row(i);
    }
    void row(i64 i) const {
        const i64 n = c.n, whole = n / W * W;
        const float *x = c.x + i * n, *weight = c.weight;
        float *y = c.y + i * n, rest = 0;
        V squares = V{};
        for (i64 j = 0; j < whole; j += W) squares += load<V>(x + j) * load<V>(x + j);
        for (i64 j = whole; j < n; j++) rest += x[j] * x[j];
        float by = 1.0f / std::sqrt((sum(squares) + rest) / n + eps);
        for (i64 j = 0; j < whole; j += W) store(y + j, by * load<V>(x + j) * (offset + load<V>(weight + j)));
        for (i64 j = whole; j < n; j++) y[j] = by * x[j] * (offset + weight[j]);
    }
};

void norm(const Norm& c, double offset, double eps) {
    i64 workers = c.rows * c.n < SERIAL ? 1 : c.threads;
    Norms norms{c, (float)offset, (float)eps, (c.rows + workers - 1) / workers};
    parallel(workers, workers, Norms::some, &norms);
}

}  // namespace

namespace token {

extern const TokenKernel VARIANT;
const TokenKernel VARIANT = {run, norm};

}  // namespace token
}  // namespace mnemos
