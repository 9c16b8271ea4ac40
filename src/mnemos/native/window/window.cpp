// A token of attention with a window, sinks and a state, for one kind of processor (WIDTH floats a vector, table VARIANT).
//
// The oldest token of the window enters S and z by its features, and gives its place to the new one. A worker takes a key
// head of a row with its query heads; S is written once, in the loop in which they read it.
#include "window/window.h"

#include <cmath>
#include <memory>

#include "decoder/keys.h"
#include "simd/product.h"
#include "threads.h"

namespace mnemos {
namespace {

constexpr i64 SERIAL = 1 << 16;     // numbers of states below which other threads are not worth waking
constexpr float KEY_EPS = 1e-6f;    // added to the squared length of a key's features

// y += a·x, n numbers.
ALWAYS void add(float* y, float a, const float* x, i64 n) {
    i64 i = 0;
    for (; i + W <= n; i += W) store(y + i, load<V>(y + i) + a * load<V>(x + i));
    for (; i < n; i++) y[i] += a * x[i];
}

struct Step {
    const WindowToken& c;
    float scale, softcap, kept;
    i64 ldd, ldm, ldf, ldn, each, workers;
    std::unique_ptr<Memory> block;
    float* base;

    Step(const WindowToken& c, double scale, double softcap, double kept)
        : c(c), scale((float)scale), softcap((float)softcap), kept((float)kept) {
        workers = c.B * c.heads * c.F * c.M < SERIAL ? 1 : least(c.threads, c.B * c.heads);
        ldd = rounded(c.D, W), ldm = rounded(c.M, W), ldf = rounded(c.F, W), ldn = rounded(c.sinks + c.window, W);
        each = ldd + ldn + ldf + (1 + c.G) * (ldf + ldm) + rounded(c.G, W);
        block = std::make_unique<Memory>(workers * each);
        base = block->numbers();
    }

    // A row of n numbers with zeros up to `ld`.
    void pad(float* to, const float* from, i64 n, i64 ld) const {
        std::memcpy(to, from, n * sizeof(float));
        for (i64 i = n; i < ld; i++) to[i] = 0;
    }

    // φ(x) [F]; x [D] is padded to whole vectors, and so is φ(x), with zeros. scratch [F/2].
    void map(const float* x, const float* weight, float* phi, float* scratch) const {
        for (i64 i = c.F; i < ldf; i++) phi[i] = 0;
        if (c.features == EXPONENTIAL) {
            for (i64 i = 0; i < c.D; i += W) {
                V found = apply<ELU>(load<V>(x + i));
                std::memcpy(phi + i, &found, least(W, c.D - i) * sizeof(float));
            }
            return;
        }
        const i64 n = c.F / 2;
        float largest = 0;
        for (i64 i = 0; i < n; i += W) {
            V found[W];
            i64 here = least(W, n - i);
            for (i64 j = 0; j < here; j++) found[j] = dot(x, weight + (i + j) * c.D, c.D);
            for (i64 j = here; j < W; j++) found[j] = V{};
            float total[W];
            sums<W>(found, total);
            for (i64 j = 0; j < here; j++) {
                scratch[i + j] = total[j];
                largest = std::fabs(total[j]) > largest ? std::fabs(total[j]) : largest;
            }
        }
        for (i64 i = 0; i < n; i += W) {
            i64 here = least(W, n - i);
            V y = first(scratch + i, here), up = exponential(y - largest), down = exponential(-y - largest);
            std::memcpy(phi + i, &up, here * sizeof(float));
            std::memcpy(phi + n + i, &down, here * sizeof(float));
        }
    }

    static void head(void* context, i64 unit, i64 worker) {
        const Step& step = *(const Step*)context;
        step.head(unit, step.base + worker * step.each);
    }
    void head(i64 unit, float* room) const {
        const i64 of = unit % c.heads, n = c.sinks + c.window;
        float *x = room, *scratch = x + ldd, *scores = scratch + ldf, *fk = scores + ldn, *u = fk + ldf;
        float *fq = u + ldm, *out = fq + c.G * ldf, *norms = out + c.G * ldm;
        float *keys = c.keys + unit * c.window * c.D, *values = c.values + unit * n * c.M;
        float *slot = keys + c.place * c.D, *value = values + (c.sinks + c.place) * c.M;
        float* from = c.from ? c.from + (unit * c.window + c.place) * c.D : slot;
        for (i64 i = 0; i < c.G * ldm; i++) out[i] = 0;
        for (i64 g = 0; g < c.G; g++) norms[g] = 0;
        if (c.features != NO_STATE) {
            pad(x, from, c.D, ldd), map(x, c.key_map + of * c.F / 2 * c.D, fk, scratch);
            for (i64 g = 0; g < c.G; g++) {
                const i64 h = of * c.G + g;
                pad(x, c.from_q + (unit * c.G + g) * c.D, c.D, ldd);
                map(x, c.query_map + h * c.F / 2 * c.D, fq + g * ldf, scratch);
            }
            advance(unit, value, fk, u, fq, out, norms);
        }
        std::memcpy(slot, c.k + unit * c.D, c.D * sizeof(float));
        std::memcpy(value, c.v + unit * c.M, c.M * sizeof(float));
        if (c.from) std::memcpy(from, c.from_k + unit * c.D, c.D * sizeof(float));
        for (i64 g = 0; g < c.G; g++) near(unit, g, keys, values, x, scores, out + g * ldm, norms[g]);
    }

    // The value of the oldest token enters S and z by its features fk. What the query heads read of S and z comes after:
    // out [G, M] += γ φ_q S and norms [G] += γ φ_q·z.
    void advance(i64 unit, const float* value, float* fk, float* u, const float* fq, float* out, float* norms) const {
        const i64 of = unit % c.heads;
        float *s = c.s + unit * c.F * c.M, *z = c.z + unit * c.F, one = 1;
        for (i64 i = 0; i < ldm; i++) u[i] = 0;
        if (c.beta) {
            const float rate = c.beta[of], by = 1.0f / std::sqrt(sum(dot(fk, fk, c.F)) + KEY_EPS);
            for (i64 i = 0; i < ldf; i += W) store(fk + i, by * load<V>(fk + i));
            for (i64 d = 0; d < c.F; d++) add(u, fk[d], s + d * c.M, c.M);
            for (i64 m = 0; m < c.M; m++) u[m] = rate * (value[m] - kept * u[m]);
            one = rate * (1 - kept * sum(dot(fk, z, c.F)));
        } else {
            std::memcpy(u, value, c.M * sizeof(float));
        }
        for (i64 d = 0; d < c.F; d++) {
            float* row = s + d * c.M;
            z[d] = kept * z[d] + fk[d] * one;
            i64 m = 0;
            for (; m + W <= c.M; m += W) {
                V now = kept * load<V>(row + m) + fk[d] * load<V>(u + m);
                store(row + m, now);
                for (i64 g = 0; g < c.G; g++)
                    store(out + g * ldm + m, load<V>(out + g * ldm + m) + fq[g * ldf + d] * now);
            }
            for (; m < c.M; m++) {
                row[m] = kept * row[m] + fk[d] * u[m];
                for (i64 g = 0; g < c.G; g++) out[g * ldm + m] += fq[g * ldf + d] * row[m];
            }
        }
        for (i64 g = 0; g < c.G; g++) {
            const float gamma = c.gamma[of * c.G + g], norm = sum(dot(fq + g * ldf, z, c.F));
            norms[g] = gamma * (c.beta && norm < 0 ? 0 : norm);
            for (i64 m = 0; m < c.M; m++) out[g * ldm + m] *= gamma;
        }
    }

    // y of a query head: to what it read of the state come sinks and window, and all is divided by the sum of weights.
    void near(i64 unit, i64 g, const float* keys, const float* values, float* x, float* scores, float* out,
              float norm) const {
        const i64 n = c.sinks + c.window, row = unit * c.G + g;
        pad(x, c.met + row * c.D, c.D, ldd);
        dots(x, c.sink_k + unit * c.sinks * c.D, c.sinks, scores);
        pad(x, c.q + row * c.D, c.D, ldd);
        dots(x, keys, c.window, scores + c.sinks);
        float most = -INFINITY;
        for (i64 j = 0; j < n; j++) {
            scores[j] *= scale;
            if (softcap != 0) scores[j] = softcap * std::tanh(scores[j] / softcap);
            most = scores[j] > most ? scores[j] : most;
        }
        for (i64 j = n; j < ldn; j++) scores[j] = -INFINITY;
        V total = V{};
        for (i64 j = 0; j < n; j += W) {
            V p = exponential(load<V>(scores + j) - most);
            store(scores + j, p), total += p;
        }
        for (i64 j = 0; j < n; j++) add(out, scores[j], values + j * c.M, c.M);
        const float by = 1 / (norm + sum(total));
        float* y = c.y + row * c.M;
        for (i64 m = 0; m < c.M; m++) y[m] = by * out[m];
    }
    // found[j] = x·rows[j] of D numbers.
    void dots(const float* x, const float* rows, i64 n, float* found) const {
        for (i64 j = 0; j < n; j += W) {
            V parts[W];
            const i64 here = least(W, n - j);
            for (i64 i = 0; i < here; i++) parts[i] = dot(x, rows + (j + i) * c.D, c.D);
            for (i64 i = here; i < W; i++) parts[i] = V{};
            float total[W];
            sums<W>(parts, total);
            std::memcpy(found + j, total, here * sizeof(float));
        }
    }
};

int step(const WindowToken& c, double scale, double softcap, double kept) {
    Step own(c, scale, softcap, kept);
    if (!own.base) return 1;
    parallel(own.workers, c.B * c.heads, Step::head, &own);
    return 0;
}

}  // namespace

namespace window_state {

extern const WindowKernel VARIANT;
const WindowKernel VARIANT = {step};

}  // namespace window_state
}  // namespace mnemos
