// The gated delta rule and decayed attention, forward and backward, for one kind of processor (WIDTH floats a vector,
// table VARIANT). See chunk.h and gradient.h for what is computed.
//
// A worker takes one head of a row through all tokens, a chunk at a time, and in the backward the heads of a part of those
// that share a key head one after the other. The forward keeps the state before every keep-th token. Between two of these the
// backward computes the chunks again, from the first to the last, and then their gradients from the last to the first.
#include <memory>
#include <vector>

#include "delta/gradient.h"
#include "delta/token.h"
#include "threads.h"

namespace mnemos {
namespace {

constexpr i64 SERIAL = 1 << 15;  // B·T·H·D·M below which other threads are not worth waking
constexpr i64 FEW = 8;           // tokens up to which one after the other is faster than a chunk

ALWAYS const float* gate_at(const Gates& x, i64 b, i64 t, i64 h) { return x.data + b * x.b + t * x.t + h * x.h; }
ALWAYS V bounded(V log) { return log < LEAST_DECAY ? all(LEAST_DECAY) : log; }

template <bool CHANNELS>
struct Work {
    static constexpr i64 C = CHUNK<CHANNELS>;
    const Delta& c;
    float scale;
    Widths w;
    i64 share, kept;    // heads of a key head, and states of a head that are kept
    i64 workers, each;  // how many, and numbers of one's memory
    bool backward, delta;
    std::unique_ptr<Memory> block;

    Work(const Delta& c, double scale, bool backward)
        : c(c), scale((float)scale), w(c), share(c.H / c.heads), kept(c.T ? (c.T - 1) / c.keep : 0), backward(backward),
          delta(c.beta.data) {
        workers = c.B * c.T * c.H * c.D * c.M < SERIAL ? 1 : least(c.threads, units());
        Taker count{nullptr, 0};
        Worker measured(*this, count);
        if (backward) Gradient<CHANNELS> also(w, count);
        each = count.used;
        block = std::make_unique<Memory>(workers * each);
    }
    Work(const Work&) = delete;

    i64 units() const { return c.B * (backward ? c.heads * c.parts : c.H); }
    // The first head of a part, and a head's part.
    i64 first(i64 part) const { return share * part / c.parts; }
    i64 part(i64 h) const { return ((h % share + 1) * c.parts - 1) / share; }
    i64 chunks() const { return backward ? c.keep / C : 1; }
    int run() {
        if (!block->numbers()) return 1;
        parallel(workers, units(), backward ? run_backward : c.T <= FEW ? run_tokens : run_forward, this);
        return 0;
    }

    // A worker's buffers, and what it does with them.
    struct Worker {
        const Work& work;
        const Delta& c;
        Widths w;
        std::vector<Chunk<CHANNELS>> chunks;
        std::vector<float*> S;  // the state before each chunk
        float *out, *logs, *turned, *scales, *dS;

        Worker(const Work& work, Taker& take) : work(work), c(work.c), w(work.w) {
            for (i64 i = 0; i < work.chunks(); i++) {
                chunks.emplace_back(w, take);
                S.push_back(take(w.D * w.Mp));
            }
            out = take(C * w.Mp), logs = take(CHANNELS ? C * w.Dp : C);
            turned = take(CHANNELS ? w.Dp : w.D * C), scales = take(C), dS = take(work.backward ? w.D * w.Mp : 0);
            for (i64 i = 0; take.base && i < C; i++) scales[i] = work.scale;
        }

        char* at(const Rows& x, i64 type, i64 b, i64 t, i64 h) const {
            return x.data + (b * x.b + t * x.t + h * x.h) * bytes_of(type);
        }
        void read(float* to, i64 ld, const Rows& x, i64 b, i64 t, i64 h, i64 n, i64 width) const {
            FETCH[c.type][IDENTITY](to, ld, at(x, c.type, b, t, h), x.t, n, width, nullptr, 0);
        }
        // Asks for rows ahead of their use. (Not inlined, GCC takes it for a function without effect, and drops it.)
        ALWAYS void ask(const Rows& x, i64 b, i64 t, i64 h, i64 width) const {
            if (t < 0 || t >= c.T) return;
            const char* row = at(x, c.type, b, t, h);
            for (i64 n = least(C, c.T - t); n > 0; n--, row += x.t * bytes_of(c.type))
                for (i64 j = 0; j < width * bytes_of(c.type); j += 64) __builtin_prefetch(row + j, 0, 2);
        }

        ALWAYS void ask_for_inputs(i64 b, i64 t, i64 h) const {
            ask(c.q, b, t, h / work.share, w.D), ask(c.k, b, t, h / work.share, w.D), ask(c.v, b, t, h, w.M);
        }

        // All that is given of n tokens.
        void begin(Chunk<CHANNELS>& x, i64 b, i64 t, i64 h, i64 n) const {
            x.n = n;
            read(x.q, w.Dp, c.q, b, t, h / work.share, n, w.D), read(x.k, w.Dp, c.k, b, t, h / work.share, n, w.D);
            for (i64 i = 0; i < n * w.Dp; i += W) store(x.q + i, load<V>(x.q + i) * work.scale);
            read(work.delta ? x.y : x.u, w.Mp, c.v, b, t, h, n, w.M);
            for (i64 i = 0; work.delta && i < n; i++) x.beta[i] = *gate_at(c.beta, b, t + i, h);
            gates(b, t, h, n);
        }
        void gates(i64 b, i64 t, i64 h, i64 n) const {
            i64 size = CHANNELS ? n * w.Dp : C;
            for (i64 i = 0; i < size; i += W) store(logs + i, V{});
            for (i64 i = 0; c.decay.data && i < n; i++) {
                const float* from = gate_at(c.decay, b, t + i, h);
                if (CHANNELS)
                    fetch_row(logs + i * w.Dp, w.Dp, from, w.D);
                else
                    logs[i] = *from;
            }
            for (i64 i = 0; i < size; i += W) store(logs + i, bounded(load<V>(logs + i)));
        }
        void prepare(Chunk<CHANNELS>& x, i64 b, i64 t, i64 h, const float* from) const {
            begin(x, b, t, h, least(C, c.T - t));
            x.decays(logs);
            x.pairs(work.delta, turned);
            x.solve(work.delta, from);
        }
        // The state before token t, which is a multiple of `keep`.
        void state(float* to, i64 b, i64 t, i64 h) const {
            i64 row = b * c.H + h;
            const float* from = t ? c.states + (row * work.kept + t / c.keep - 1) * w.D * w.M
                                  : c.s ? c.s + row * w.D * w.M : nullptr;
            load_state(to, from);
        }
        void load_state(float* to, const float* from) const {
            if (from)
                fetch_rows(to, w.Mp, from, w.M, w.D, w.M);
            else
                std::memset(to, 0, w.D * w.Mp * sizeof(float));
        }

        void forward(i64 b, i64 h) {
            Chunk<CHANNELS>& x = chunks[0];
            i64 row = b * c.H + h;
            state(S[0], b, 0, h);
            for (i64 t = 0; t < c.T; t += C) {
                if (c.states && t && t % c.keep == 0)
                    deliver_rows(S[0], w.Mp, c.states + (row * work.kept + t / c.keep - 1) * w.D * w.M, w.M, w.D, w.M);
                ask_for_inputs(b, t + C, h);
                prepare(x, b, t, h, S[0]);
                x.outputs(S[0], out);
                DELIVER[c.type](out, w.Mp, at(c.y, c.type, b, t, h), c.y.t, x.n, w.M, nullptr);
                x.advance(S[0], S[0]);
            }
            deliver_rows(S[0], w.Mp, c.s_end + row * w.D * w.M, w.M, w.D, w.M);
        }

        void tokens(i64 b, i64 h) {
            Chunk<CHANNELS>& x = chunks[0];
            i64 row = (b * c.H + h) * w.D * w.M;
            float* to = c.s_end + row;
            const float* from = c.s ? c.s + row : to;
            if (!c.s) std::memset(to, 0, w.D * w.M * sizeof(float));
            if (!c.T) return void(std::memmove(to, from, w.D * w.M * sizeof(float)));
            begin(x, b, 0, h, c.T);
            float *decay = x.to_end, dots[FEW];
            for (i64 t = 0; t < c.T; t++) {
                V dot = V{}, same = exponential(all(logs[CHANNELS ? 0 : t]));
                for (i64 d = t * w.Dp; d < t * w.Dp + w.Dw; d += W) {
                    V q = load<V>(x.q + d), k = load<V>(x.k + d), by = CHANNELS ? exponential(load<V>(logs + d)) : same;
                    dot += q * k;
                    store(decay + d, by), store(x.from_q + d, by * q), store(x.from_k + d, by * k);
                }
                dots[t] = sum(dot);
            }
            const float* v = work.delta ? x.y : x.u;
            Few few{c.T, w.Dp, w.Mp, work.delta, x.k, decay, x.from_q, x.from_k, v, x.beta, dots, out};
            one_by_one(few, w.D, w.M, from, to);
            DELIVER[c.type](out, w.Mp, at(c.y, c.type, b, 0, h), c.y.t, c.T, w.M, nullptr);
        }

        // Adds to what the part's heads before have written, or with the first of them writes.
        void write(float* from, const Rows& to, i64 b, i64 t, i64 h, i64 n, const float* by) const {
            i64 type = work.share > 1 ? (i64)FLOAT32 : c.type, part = work.part(h);
            char* where = at(to, type, b, t, h / work.share) + part * c.B * c.T * c.heads * c.D * bytes_of(type);
            if (h % work.share == work.first(part)) return DELIVER[type](from, w.Dp, where, to.t, n, w.D, by);
            for (i64 i = 0; i < n; i++) {
                float *row = from + i * w.Dp, *sum = (float*)where + i * to.t;
                if (by)
                    for (i64 d = 0; d < w.Dw; d += W) store(row + d, load<V>(row + d) * by[i]);
                add_to(sum, row, w.D);
            }
        }

        void back(Gradient<CHANNELS>& to, i64 b, i64 h) {
            i64 row = b * c.H + h;
            load_state(dS, c.gs ? c.gs + row * w.D * w.M : nullptr);
            for (i64 first = (c.T - 1) / c.keep * c.keep; c.T && first >= 0; first -= c.keep) {
                i64 count = (least(c.keep, c.T - first) + C - 1) / C;
                state(S[0], b, first, h);
                for (i64 i = 0; i < count; i++) {
                    prepare(chunks[i], b, first + i * C, h, S[i]);
                    if (i + 1 < count) chunks[i].advance(S[i], S[i + 1]);
                }
                for (i64 i = count - 1; i >= 0; i--) {
                    i64 t = first + i * C, n = chunks[i].n;
                    ask_for_inputs(b, t - c.keep, h), ask(c.g, b, t - c.keep, h, w.M);
                    read(to.g, w.Mp, c.g, b, t, h, n, w.M);
                    to.compute(chunks[i], work.delta, c.decay.data, S[i], dS);
                    write(to.dq, c.dq, b, t, h, n, scales), write(to.dk, c.dk, b, t, h, n, nullptr);
                    DELIVER[c.type](to.dv, w.Mp, at(c.dv, c.type, b, t, h), c.dv.t, n, w.M, nullptr);
                    write_gates(to, b, t, h, n);
                }
            }
            if (c.ds) deliver_rows(dS, w.Mp, c.ds + row * w.D * w.M, w.M, w.D, w.M);
        }
        void write_gates(const Gradient<CHANNELS>& from, i64 b, i64 t, i64 h, i64 n) const {
            for (i64 i = 0; i < n; i++) {
                i64 at = (b * c.T + t + i) * c.H + h;
                if (c.d_beta) c.d_beta[at] = from.beta[i];
                if (!c.d_decay) continue;
                if (CHANNELS)
                    deliver_row(from.decay + i * w.Dp, c.d_decay + at * w.D, w.D);
                else
                    c.d_decay[at] = from.decay[i];
            }
        }
    };

    Taker memory(i64 worker) const { return {block->numbers() + worker * each, 0}; }
    static void run_forward(void* context, i64 unit, i64 worker) {
        const Work& work = *(const Work*)context;
        Taker take = work.memory(worker);
        Worker(work, take).forward(unit / work.c.H, unit % work.c.H);
    }
    static void run_tokens(void* context, i64 unit, i64 worker) {
        const Work& work = *(const Work*)context;
        Taker take = work.memory(worker);
        Worker(work, take).tokens(unit / work.c.H, unit % work.c.H);
    }
    static void run_backward(void* context, i64 unit, i64 worker) {
        const Work& work = *(const Work*)context;
        Taker take = work.memory(worker);
        Worker own(work, take);
        Gradient<CHANNELS> gradient(work.w, take);
        i64 part = unit % work.c.parts, head = unit / work.c.parts % work.c.heads, b = unit / work.c.parts / work.c.heads;
        for (i64 h = work.first(part); h < work.first(part + 1); h++) own.back(gradient, b, head * work.share + h);
    }
};

int compute(const Delta& c, double scale, bool backward) {
    if (!c.B || !c.H) return 0;
    return c.channels ? Work<true>(c, scale, backward).run() : Work<false>(c, scale, backward).run();
}

int forward(const Delta& c, double scale) { return compute(c, scale, false); }
int backward(const Delta& c, double scale) { return compute(c, scale, true); }

}  // namespace

namespace delta_rule {

extern const DeltaRule VARIANT;
const DeltaRule VARIANT = {forward, backward};

}  // namespace delta_rule
}  // namespace mnemos
