// One token of every row through a whole stack of blocks with linear or softmax attention or a layer that forgets, for
// one kind of processor.
//
// What a token must cost is reading the weights once; what it costs, one operation after the other, is their number. So
// the threads meet once a token, and then share out the rows of each matrix, with a barrier between one and the next.
// All of them hold the residual stream in common, and each normalises it for itself: that takes less than a barrier.
#include "decoder/decode.h"

#include <cstdlib>

#include "delta/token.h"
#include "decoder/keys.h"
#include "decoder/matrix.h"
#include "linear/scan.h"
#include "threads.h"

namespace mnemos {
namespace {

constexpr i64 EARLY = 4;           // heads' states that are asked for ahead of their use
constexpr float TEMPERATURE = 16;  // of GLA's decays

class Decoding {
   public:
    Decoding(const Stack& m, const Layer* layers, const Step& c, const Memory* memories, const Numbers& numbers)
        : m(m), c(c), layers(layers), memories(memories), numbers(numbers) {
        i64 width = rounded(m.width, UNIT), features = rounded(m.width / m.heads, W);
        i64 turns = rounded(turned(), UNIT);
        // The attention to a source has its queries and its heads where the layer's own were.
        i64 made = m.reads && inner() < m.width ? m.width : inner(), out = m.reads && outer() < m.width ? m.width : outer();
        i64 common = 2 * width + rounded(made, UNIT) + rounded(out, UNIT) + (1 + m.gated) * rounded(m.mlp, UNIT) + rounded(m.hidden, UNIT) + turns;
        i64 lists = Listed::size(c.own, c.rows) + Listed::size(c.source, c.rows);
        i64 most = c.own.entries > c.source.entries ? c.own.entries : c.source.entries;
        i64 head = forgets() ? 5 * rounded(m.key_width, W) + 2 * rounded(m.value_width, W) : 0;
        own = rounded(c.rows * width + 2 * features + rounded(most, W) + head, UNIT);
        i64 size = c.rows * common + rounded(lists, UNIT) + c.threads * own;
        memory = (float*)std::aligned_alloc(64, rounded(size * sizeof(float), 64));
        if (!memory) return;
        float* at = memory;
        auto take = [&](i64 n) {
            Vectors found{at, rounded(n, UNIT)};
            at += c.rows * found.ld;
            return found;
        };
        x = take(m.width), qkv = take(made), heads = take(out), mlp = take(m.mlp), hidden = take(m.hidden);
        turn = take(turns), gates = take(m.gated * m.mlp);
        lists_own = Listed(c.own, (std::int32_t*)at);
        lists_source = Listed(c.source, (std::int32_t*)at + Listed::size(c.own, c.rows));
        private_ = at + rounded(lists, UNIT);
    }
    ~Decoding() { std::free(memory); }
    Decoding(const Decoding&) = delete;

    bool ready() const { return memory != nullptr; }

    static void run(void* self, i64 worker, i64 workers) {
        Decoding& one = *(Decoding*)self;
        if (Weights(one.m.weights) == Weights::FLOAT32) one.work<float>(worker, workers);
        if (Weights(one.m.weights) == Weights::BFLOAT16) one.work<Bfloat16>(worker, workers);
        if (Weights(one.m.weights) == Weights::INT8) one.work<std::int8_t>(worker, workers);
    }

   private:
    const Stack& m;
    const Step& c;
    const Layer* layers;
    const Memory* memories;
    const Numbers& numbers;
    float *memory, *private_;
    i64 own;                                   // floats of a thread's memory
    Vectors x, qkv, heads, mlp, hidden, turn, gates;  // [rows, ..]
    Listed lists_own, lists_source;
    Barrier barrier;

    bool forgets() const { return m.attention >= DELTA; }

    // Where the parts of what a layer that forgets makes of a token lie: queries, keys and values, of which all or none are
    // convolved, from `first` on; β; what the decay and the gate are made of; and the end.
    struct Parts {
        i64 first, q, k, v, beta, decay, gate, end;
    };
    Parts parts() const {
        i64 K = m.key_heads * m.key_width, V = m.heads * m.value_width, C = 2 * K + V, H = m.heads;
        if (m.attention == MAMBA2) return {V, 2 * V + K, 2 * V, V, 0, V + C, 0, V + C + H};
        if (m.attention == GLA) return {0, 0, K, 2 * K, 0, C + V, C, C + V + m.rank};
        if (m.attention == RETENTION) return {0, 0, K, 2 * K, 0, 0, C, C + V};
        if (m.decay == HEAD) return {0, 0, K, 2 * K, C, C + H, C + 2 * H, C + 2 * H + V};
        i64 low = m.decay == CHANNEL ? m.key_width + m.value_width : 0;
        return {0, 0, K, 2 * K, C, C + H, C + H + m.key_width, C + H + low};
    }

    // The width of what is made of a token for the attention, of its heads together, and of heads whose positions rotate.
    i64 inner() const { return forgets() ? parts().end : 3 * m.width; }
    i64 outer() const { return forgets() ? m.heads * m.value_width : m.width; }
    i64 turned() const {
        if (m.attention == RETENTION) return m.key_width;
        return m.position == ROTARY ? m.width / m.heads : 0;
    }

    // The i-th matrix that a token meets: four to seven of a layer, and then the head's.
    Matrix matrix(i64 i, i64 me, i64 all) const {
        i64 each = (m.reads ? 6 : 4) + m.gated;
        if (i >= each * m.layers) {
            if (i == each * m.layers && m.hidden) return {m.before_head, m.hidden, m.width, me, all};
            return {m.head, m.outputs, m.hidden ? m.hidden : m.width, me, all};
        }
        const Layer& layer = layers[i / each];
        i %= each;
        if (i == 0) return {layer.qkv, inner(), m.width, me, all};
        if (i == 1) return {layer.output, m.width, outer(), me, all};
        if (m.reads && i < 4) return {i == 2 ? layer.query : layer.read_output, m.width, m.width, me, all};
        if (m.gated && i == each - 3) return {layer.gate, m.mlp, m.width, me, all};
        if (i == each - 2) return {layer.expand, m.mlp, m.width, me, all};
        return {layer.contract, m.width, m.mlp, me, all};
    }

    template <class T>
    void work(i64 me, i64 all) {
        Vectors mine{private_ + me * own, rounded(m.width, UNIT)};
        // y = w·x + bias (+ more) with the next matrix, each thread some rows of w.
        i64 i = 0;
        auto multiply_next = [&](Vectors x, Vectors y, const Vectors* more = nullptr, bool active = false) {
            Matrix w = matrix(i++, me, all), next = matrix(i, me, all);
            multiply(w, c.rows, x, y, more, next.template row<T>(next.from));
            if (active)
                for (i64 b = 0; b < c.rows; b++) activate(m.activation, y[b] + w.from, w.to - w.from);
            barrier.wait(all);
        };
        // mlp = activation(gate·x) ⊙ (expand·x): a thread has the same rows of both matrices, so none waits in between.
        auto multiply_gated = [&](Vectors x) {
            Matrix gate = matrix(i++, me, all), w = matrix(i++, me, all), next = matrix(i, me, all);
            multiply(gate, c.rows, x, gates, nullptr, w.template row<T>(w.from));
            multiply(w, c.rows, x, mlp, nullptr, next.template row<T>(next.from));
            for (i64 b = 0; b < c.rows; b++) {
                activate(m.activation, gates[b] + w.from, w.to - w.from);
                for (i64 n = w.from; n < w.to; n++) mlp[b][n] *= gates[b][n];
            }
            barrier.wait(all);
        };
        embed(me, all);
        const Affine* norm = nullptr;  // with norms after the sum: what the stream goes through before it is used
        auto enter_next = [&](const Affine& of_part) {
            Vectors in = enter(m.post ? norm : &of_part, mine);
            norm = &of_part;
            return in;
        };
        for (i64 l = 0; l < m.layers; l++) {
            const Layer& layer = layers[l];
            Vectors in = enter_next(layer.attention_norm);
            multiply_next(in, qkv);
            if (m.attention == LINEAR) sum_up(memories[l].sums, me, all, mine[c.rows]);
            if (m.attention == SOFTMAX) attend(memories[l].own, me, all, mine[c.rows]);
            if (forgets()) recur<T>(layer, memories[l], me, all, mine[c.rows]);
            multiply_next(heads, x, m.post ? &in : &x);
            if (m.reads) {
                in = enter_next(layer.read_norm);
                multiply_next(in, qkv);
                read(memories[l].source, me, all, mine[c.rows]);
                multiply_next(heads, x, m.post ? &in : &x);
            }
            in = enter_next(layer.mlp_norm);
            if (m.gated)
                multiply_gated(in);
            else
                multiply_next(in, mlp, nullptr, true);
            multiply_next(mlp, x, m.post ? &in : &x);
        }
        Vectors in = enter(m.post ? norm : &m.final_norm, mine);
        if (m.hidden) multiply_next(in, hidden, nullptr, true);
        multiply_next(m.hidden ? hidden : in, {c.logits, m.outputs});
    }

    // The part of n units that is this thread's.
    static void share(i64 me, i64 all, i64 n, i64& from, i64& to) { from = n * me / all, to = n * (me + 1) / all; }

    Vectors enter(const Affine* norm, Vectors mine) {
        if (!norm) return x;
        for (i64 b = 0; b < c.rows; b++) normalise(*norm, m.rms, m.width, numbers.norm_eps, x[b], mine[b]);
        return mine;
    }

    // Tokens' vectors and their positions'; angles in double precision, so that any position is exact. And what is the
    // same in all layers: the rotations of positions, and which entries a row attends to.
    void embed(i64 me, i64 all) {
        i64 from, to;
        share(me, all, c.rows, from, to);
        if (m.attention == SOFTMAX) lists_own.list(from, to);
        if (m.reads) lists_source.list(from, to);
        const double* frequencies = m.attention == RETENTION ? m.turns : m.frequencies;
        for (i64 b = from; b < to; b++)
            for (i64 i = 0; 2 * i < turned(); i++) {
                double angle = (c.seen ? c.seen[b] : 0) * frequencies[i];
                turn[b][2 * i] = (float)std::cos(angle), turn[b][2 * i + 1] = (float)std::sin(angle);
            }
        share(me, all, rounded(m.width, UNIT) / UNIT, from, to);
        from = from * UNIT, to = least(to * UNIT, m.width);
        for (i64 b = 0; b < c.rows; b++) {
            const float* token = m.embedding + c.tokens[b * c.stride] * m.width;
            i64 place = c.seen ? c.seen[b] : 0;
            for (i64 i = from; i < to; i++) x[b][i] = token[i] * (float)numbers.embedding;
            if (m.position == LEARNED)
                for (i64 i = from; i < to; i++) x[b][i] += m.positions[place * m.width + i];
            if (m.position == SINUSOIDAL)
                for (i64 i = from; i < to; i++) {
                    double angle = place * m.frequencies[i / 2];
                    x[b][i] += (float)(i % 2 ? std::cos(angle) : std::sin(angle));
                }
        }
        barrier.wait(all);
    }

    // s' = s + φ(k)·vᵀ, z' = z + φ(k), y = φ(q)·s' / (φ(q)·z' + eps); each thread some heads of all rows'.
    void sum_up(const Sums& t, i64 me, i64 all, float* q) {
        i64 D = m.width / m.heads, from, to;
        float* k = q + rounded(D, W);
        share(me, all, c.rows * m.heads, from, to);
        for (i64 i = from; i < to; i++) {
            i64 b = i / m.heads, h = i % m.heads;
            const float* later = t.s + (i + EARLY) * D * D;
            for (i64 j = 0; i + EARLY < to && j < D * D; j += LINE) __builtin_prefetch(later + j, 0, 2);
            float *row = qkv[b] + h * D, *y = heads[b] + h * D, den = (float)numbers.attention_eps;
            if (m.position == ROTARY) rotate(row, turn[b], D), rotate(row + m.width, turn[b], D);
            mapped(row, q, D), mapped(row + m.width, k, D);
            for (i64 d = 0; d < D; d++) t.z_end[i * D + d] = t.z[i * D + d] + k[d], den += q[d] * t.z_end[i * D + d];
            const float* s = t.s + i * D * D;
            float* s_end = t.s_end + i * D * D;
            token(s, s_end, D, D, k, q, row + 2 * m.width, y);
            for (i64 d = 0; d < D; d++) y[d] /= den;
        }
        barrier.wait(all);
    }

    // S' = e^g ⊙ S, S = S' + k·uᵀ, and the norm and gate of Sᵀq, where u = β(v − S'ᵀk) by the delta rule and v without it; each
    // thread some heads of all rows'. See attention/delta.py, decayed.py and mamba2.py.
    template <class T>
    void recur(const Layer& layer, const Memory& t, i64 me, i64 all, float* q) {
        const Recurrent& own = layer.recurrent;
        const Parts at = parts();
        i64 H = m.heads, D = m.key_width, M = m.value_width, from, to;
        float *k = q + rounded(D, W), *decay = k + rounded(D, W), *decayed_q = decay + rounded(D, W);
        float *decayed_k = decayed_q + rounded(D, W), *v = decayed_k + rounded(D, W), *gate = v + rounded(M, W);
        share(me, all, c.rows * H, from, to);
        for (i64 i = from; i < to; i++) {
            i64 b = i / H, h = i % H, shared = H / m.key_heads, head = h / shared;
            const float *row = qkv[b], *later = t.sums.s + (i + EARLY) * D * M;
            for (i64 j = 0; i + EARLY < to && j < D * M; j += LINE) __builtin_prefetch(later + j, 0, 2);
            convolve(own, t.window, b, at.first, at.q + head * D, D, q, h % shared == 0);
            convolve(own, t.window, b, at.first, at.k + head * D, D, k, h % shared == 0);
            convolve(own, t.window, b, at.first, at.v + h * M, M, v, true);
            float of_q = m.attention == MAMBA2 ? 1 : 1 / std::sqrt((float)D), of_k = 1;
            if (m.attention == DELTA) of_q /= std::sqrt(dot(q, q, D) + 1e-6f), of_k = 1 / std::sqrt(dot(k, k, D) + 1e-6f);
            if (m.attention == RETENTION) rotate(q, turn[b], D), rotate(k, turn[b], D);
            float common = forget<T>(layer, row, at, h, b, decay);
            if (m.attention == MAMBA2) of_k = common;
            for (i64 d = 0; d < D; d++) {
                q[d] *= of_q, k[d] *= of_k;
                decayed_q[d] = decay[d] * q[d], decayed_k[d] = decay[d] * k[d];
            }
            bool delta = m.attention == DELTA;
            float beta = delta ? (m.doubled ? 2 : 1) / (1 + std::exp(-row[at.beta + h])) : 1, dots = dot(q, k, D);
            float* y = heads[b] + h * M;
            Few token{1, 0, 0, delta, k, decay, decayed_q, decayed_k, v, &beta, &dots, y};
            one_by_one(token, D, M, t.sums.s + i * D * M, t.sums.s_end + i * D * M);
            bool low = delta && m.decay == CHANNEL, gated = !delta || m.decay != NONE;
            if (low) part<T>(layer.to_gate, M, M, h, b, at.gate, gate);
            if (low) for_each([](V x) ALWAYS_LAMBDA { return logistic(x); }, gate, M);
            if (gated && !low) std::memcpy(gate, row + at.gate + h * M, M * sizeof(float)), activate(SILU, gate, M);
            for (i64 j = 0; m.attention == MAMBA2 && j < M; j++) y[j] += own.skip[h] * v[j];
            if (m.attention != MAMBA2) norm_of_head(own.scale, M, y);
            for (i64 j = 0; gated && j < M; j++) y[j] *= gate[j];
        }
        barrier.wait(all);
        if (m.attention != MAMBA2) return;
        i64 n = H / m.key_heads * M;  // Mamba-2's norm is over the heads that share keys
        share(me, all, c.rows * m.key_heads, from, to);
        for (i64 i = from; i < to; i++) norm_of_head(own.scale + i % m.key_heads * n, n, heads[i / m.key_heads] + i % m.key_heads * n);
        barrier.wait(all);
    }

    // y = SiLU of the convolution of n channels of row b that begin at `at`, or these as they are. `whose`: keeps its inputs.
    void convolve(const Recurrent& own, const Window& window, i64 b, i64 first, i64 at, i64 n, float* y, bool whose) const {
        const float* x = qkv[b] + at;
        if (!own.convolution) return (void)std::memcpy(y, x, n * sizeof(float));
        i64 C = 2 * m.key_heads * m.key_width + outer(), channel = at - first;
        const float *w = own.convolution + 4 * channel, *bias = own.convolution_biases, *p = window.from + b * 3 * C + channel;
        for (i64 j = 0; j < n; j++)
            y[j] = w[4 * j] * p[j] + w[4 * j + 1] * p[C + j] + w[4 * j + 2] * p[2 * C + j] + w[4 * j + 3] * x[j];
        for (i64 j = 0; bias && j < n; j++) y[j] += bias[channel + j];
        activate(SILU, y, n);
        if (!whose) return;
        float* next = window.to + b * 3 * C + channel;
        std::memcpy(next, p + C, n * sizeof(float)), std::memcpy(next + C, p + 2 * C, n * sizeof(float));
        std::memcpy(next + 2 * C, x, n * sizeof(float));
    }

    // decay = e^g of the D channels of head h of row b. Returns Δ, the step of a decay per head.
    template <class T>
    float forget(const Layer& layer, const float* row, const Parts& at, i64 h, i64 b, float* decay) const {
        const Recurrent& own = layer.recurrent;
        i64 D = m.key_width;
        float rate = own.rates ? -std::exp(own.rates[h]) : 0, step = 1, all = 1;
        if (m.decay == CHANNEL) {
            bool gla = m.attention == GLA;
            part<T>(layer.to_decay, D, gla ? m.rank : D, h, b, at.decay, decay);
            for (i64 d = 0; d < D; d++)
                decay[d] = std::exp(gla ? -softplus(-decay[d]) / TEMPERATURE : rate * softplus(decay[d] + own.biases[h * D + d]));
            return step;
        }
        if (m.attention == RETENTION) all = 1 - std::exp2((float)(-5 - h));
        if (m.attention != RETENTION && m.decay == HEAD) step = softplus(row[at.decay + h] + own.biases[h]), all = std::exp(rate * step);
        for (i64 d = 0; d < D; d++) decay[d] = all;
        return step;
    }

    // y/√(mean of y² + eps), times `scale` if there is one.
    void norm_of_head(const float* scale, i64 n, float* y) const {
        float by = 1 / std::sqrt(dot(y, y, n) / n + (float)numbers.attention_eps);
        for (i64 j = 0; j < n; j++) y[j] *= scale ? by * scale[j] : by;
    }

    // y = the `each` rows of head h of w [heads·each, n] times what is made of the token of row b from `at` on.
    template <class T>
    void part(const Affine& w, i64 each, i64 n, i64 h, i64 b, i64 at, float* y) const {
        Matrix rows(w, m.heads * each, n, 0, 1);
        rows.from = h * each, rows.to = rows.from + each;
        multiply(rows, 1, Vectors{qkv[b] + at, 0}, Vectors{y - rows.from, 0}, nullptr, rows.template row<T>(rows.from));
    }

    static float dot(const float* a, const float* b, i64 n) {
        V total = V{};
        i64 i = 0;
        for (; i + W <= n; i += W) total += load<V>(a + i) * load<V>(b + i);
        return sum(total + first(a + i, n - i) * first(b + i, n - i));
    }

    static float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

    // y = softmax(q·k/√D)·v over a row's entries and its new one; each thread some heads of all rows'.
    void attend(const Keys& t, i64 me, i64 all, float* q) {
        i64 D = m.width / m.heads, copies = c.own.copies, from, to;
        share(me, all, c.rows * m.heads, from, to);
        for (i64 i = from; i < to; i++) {
            i64 b = i / m.heads, h = i % m.heads, place = c.own.entries - copies + b % copies;
            float* row = qkv[b] + h * D;
            if (m.position == ROTARY) rotate(row, turn[b], D), rotate(row + m.width, turn[b], D);
            i64 group = b / copies * t.group + h * t.head, entry = group + place * t.entry;
            std::memcpy(t.k + entry, row + m.width, D * sizeof(float));
            std::memcpy(t.v + entry, row + 2 * m.width, D * sizeof(float));
            query(row, q, D);
            attend_to(t.k + group, t.v + group, t.entry, lists_own.entries(b), lists_own.count(b), q, D,
                      q + rounded(D, W), heads[b] + h * D);
        }
        barrier.wait(all);
    }

    // The same over the entries of a row's source; its queries lie where those of the row's own tokens lay.
    void read(const Keys& t, i64 me, i64 all, float* q) {
        i64 D = m.width / m.heads, from, to;
        share(me, all, c.rows * m.heads, from, to);
        for (i64 i = from; i < to; i++) {
            i64 b = i / m.heads, h = i % m.heads, group = b / c.source.copies * t.group + h * t.head;
            query(qkv[b] + h * D, q, D);
            attend_to(t.k + group, t.v + group, t.entry, lists_source.entries(b), lists_source.count(b), q, D,
                      q + rounded(D, W), heads[b] + h * D);
        }
        barrier.wait(all);
    }

    // q/√D, and zeros up to whole vectors.
    static void query(const float* from, float* q, i64 D) {
        float by = 1 / std::sqrt((float)D);
        for (i64 d = 0; d < D; d++) q[d] = from[d] * by;
        for (i64 d = D; d < rounded(D, W); d++) q[d] = 0;
    }

    // Pairs of channels, turned by the cosines and sines of their angles.
    static void rotate(float* x, const float* turn, i64 D) {
        for (i64 d = 0; d < D; d += 2) {
            float a = x[d], b = x[d + 1], cosine = turn[d], sine = turn[d + 1];
            x[d] = a * cosine - b * sine, x[d + 1] = a * sine + b * cosine;
        }
    }

    void mapped(const float* from, float* to, i64 D) const {
        auto f = m.map == ELU ? fetch<FLOAT32, ELU> : fetch<FLOAT32, RELU>;
        f(to, rounded(D, W), (const char*)from, D, 1, D, nullptr, 0);
    }
};

int decode(const Stack& m, const Layer* layers, const Step& c, const Memory* memories, const Numbers& numbers) {
    for (i64 b = 0; b < c.rows; b++) {
        i64 token = c.tokens[b * c.stride], place = c.seen ? c.seen[b] : 0;
        if (token < 0 || token >= m.vocabulary || (m.position == LEARNED && (place < 0 || place >= m.limit))) return 1;
    }
    Decoding one(m, layers, c, memories, numbers);
    if (!one.ready()) return 1;
    together(c.threads, Decoding::run, &one);
    return 0;
}

}  // namespace

namespace decoder {

extern const Decoder VARIANT;
const Decoder VARIANT = {decode, activate};

}  // namespace decoder
}  // namespace mnemos
