// The selective scan of Mamba, forward and backward, for one kind of processor (WIDTH floats a vector, table VARIANT).
//
//     e = exp(dt A)     S ← e ⊙ S + (dt x) B     y = S C + D x                 of every channel, S, A, B and C [N]
//
// A unit is a group of channels of one row, and a vector holds W of its channels: then no sum within a vector is needed for
// y, dt and x. Everything is turned to [.., channels] for that once per call. The forward keeps the state before every
// keep-th token. The backward goes through these pieces from the last to the first: it computes the states and the decays
// of a piece again, and then its gradients, with G the gradient of the state after a token:
//
//     G += dy C     dC = Σ dy S     dB = Σ (dt x) G     du = G·B     q = G ⊙ e ⊙ S_before     dA += dt q
//     dx = dt du + D dy     d(dt) = x du + q·A     G ← e ⊙ G
//
// Sums over channels, for B and C, are kept per group and added up at the end. Invalid tokens count as rows of zeros, with
// e = 1; a reset is e = 0.
#include "selective/selective.h"

#include <memory>

#include "simd/product.h"
#include "simd/rows.h"
#include "threads.h"

namespace mnemos {
namespace {

constexpr i64 SERIAL = 1 << 16;  // B·T·C·N below which other threads are not worth waking
constexpr i64 GROUP = 128;       // channels of a unit

// The sum of each of n vectors.
void sum_up(const float* from, float* to, i64 n) {
    i64 i = 0;
    for (; i + 8 <= n; i += 8) {
        V x[8];
        for (i64 j = 0; j < 8; j++) x[j] = load<V>(from + (i + j) * W);
        sums<8>(x, to + i);
    }
    for (; i < n; i++) to[i] = sum(load<V>(from + i * W));
}

ALWAYS bool marked(const Marks& x, i64 b, i64 t) { return x.data && x.data[b * x.b + t * x.t]; }

struct Work {
    const Selective& c;
    bool backward;
    i64 groups, kept, ld, workers, each;  // ld: of rows of N numbers; `each` worker's numbers
    std::unique_ptr<Memory> block;
    float *sums, *rates, *skips;  // [groups, 2, B, T, N], [B, groups, N, GROUP] and [B, groups, GROUP]

    Work(const Selective& c, bool backward)
        : c(c), backward(backward), groups((c.C + GROUP - 1) / GROUP), kept(c.T ? (c.T - 1) / c.keep : 0),
          ld(rounded(c.N, LANES)), workers(c.B * c.T * c.C * c.N < SERIAL ? 1 : least(c.threads, c.B * groups)) {
        Taker count{nullptr, 0};
        Worker measured(*this, count);
        each = count.used;
        block = std::make_unique<Memory>(lay(nullptr));
    }
    Work(const Work&) = delete;

    int run() {
        if (!block->numbers()) return 1;
        lay(block->numbers());
        parallel(workers, c.B * groups, unit, this);
        if (backward) add_up();
        return 0;
    }

   private:
    float* own;

    i64 lay(float* base) {
        Taker take{base, 0};
        own = take(workers * each);
        sums = take(backward ? groups * 2 * c.B * c.T * c.N : 0);
        rates = take(backward ? c.B * groups * c.N * GROUP : 0), skips = take(backward ? c.B * groups * GROUP : 0);
        return take.used;
    }

    // A worker's buffers: rows of GROUP channels, and of `ld` numbers for B and C.
    struct Worker {
        const Work& work;
        const Selective& c;
        i64 b, c0, width, group;  // the unit
        float *A, *S, *D, *x, *dt, *write, *read, *y, *turned;
        float *G, *g, *dx, *d_dt, *dA, *before, *decay, *d_write, *d_read;

        Worker(const Work& work, Taker& take) : work(work), c(work.c) {
            i64 N = c.N, rows = c.keep;
            A = take(N * GROUP), S = take(N * GROUP), D = take(GROUP), turned = take(LANES * work.ld);
            x = take(rows * GROUP), dt = take(rows * GROUP), y = take(rows * GROUP);
            write = take(rows * work.ld), read = take(rows * work.ld);
            if (!work.backward) return;
            G = take(N * GROUP), dA = take(N * GROUP), g = take(rows * GROUP), dx = take(rows * GROUP);
            d_dt = take(rows * GROUP), before = take(rows * N * W), decay = take(rows * N * W);
            d_write = take(rows * N * W), d_read = take(rows * N * W);
        }

        void begin(i64 index) {
            b = index / work.groups, group = index % work.groups, c0 = group * GROUP, width = least(GROUP, c.C - c0);
            turn_in(A, c.a + c0 * c.N);
            std::memset(D, 0, GROUP * sizeof(float));
            if (c.skip) std::memcpy(D, c.skip + c0, width * sizeof(float));
        }
        // [GROUP / LANES, N, LANES] of [width, N], and back. Rows of GROUP channels would lie a power of two apart, where
        // processors take the load of one for the store of another.
        void turn_in(float* to, const float* from) const {
            if (!from) return (void)std::memset(to, 0, c.N * GROUP * sizeof(float));
            for (i64 j = 0; j < width; j += LANES)
                transpose(from + j * c.N, c.N, least(LANES, width - j), c.N, c.N, to + j * c.N, LANES, 1.0f);
        }
        void turn_out(const float* from, float* to) const {
            for (i64 j = 0; j < width; j += LANES) {
                transpose(from + j * c.N, LANES, c.N, LANES, LANES, turned, work.ld, 1.0f);
                deliver_rows(turned, work.ld, to + j * c.N, c.N, least(LANES, width - j), c.N);
            }
        }
        // Where the numbers of channel j begin, LANES apart.
        i64 tile(i64 j) const { return j / LANES * LANES * c.N + j % LANES; }
        i64 place() const { return (b * c.C + c0) * c.N; }
        // The state before token t, which is a multiple of `keep`.
        float* state(i64 t) const {
            return c.states + (((b * work.kept + t / c.keep - 1) * work.groups) + group) * c.N * GROUP;
        }
        char* at(const Rows& rows, i64 t, i64 type, i64 column) const {
            return rows.data + (b * rows.b + t * rows.t + column) * bytes_of(type);
        }
        void fetch_tokens(float* to, i64 ld, const Rows& rows, i64 type, i64 t, i64 n, i64 column, i64 count) const {
            const unsigned char* mask = c.valid.data ? c.valid.data + b * c.valid.b + t * c.valid.t : nullptr;
            FETCH[type][IDENTITY](to, ld, at(rows, t, type, column), rows.t, n, count, mask, c.valid.t);
        }
        ALWAYS void ask(const Rows& rows, i64 type, i64 t) const {
            if (t < 0 || t >= c.T) return;
            for (i64 i = t; i < least(t + c.keep, c.T); i++)
                for (i64 j = 0; j < width * bytes_of(type); j += 64) __builtin_prefetch(at(rows, i, type, c0) + j, 0, 2);
        }
        void fetch_piece(i64 t, i64 n) const {
            fetch_tokens(x, GROUP, c.x, c.type, t, n, c0, width);
            fetch_tokens(dt, GROUP, c.dt, FLOAT32, t, n, c0, width);
            fetch_tokens(write, work.ld, c.write, FLOAT32, t, n, 0, c.N);
            fetch_tokens(read, work.ld, c.read, FLOAT32, t, n, 0, c.N);
        }

        void forward() {
            turn_in(S, c.s ? c.s + place() : nullptr);
            for (i64 t = 0; t < c.T; t += c.keep) {
                i64 n = least(c.keep, c.T - t);
                if (t && c.states) std::memcpy(state(t), S, c.N * GROUP * sizeof(float));
                ask(c.x, c.type, t + c.keep), ask(c.dt, FLOAT32, t + c.keep);
                fetch_piece(t, n);
                for (i64 j = 0; j < width; j += W) scan(t, n, j);
                DELIVER[c.type](y, GROUP, at(c.y, t, c.type, c0), c.y.t, n, width, nullptr);
            }
            turn_out(S, c.s_end + place());
        }
        // n tokens from t on, of the W channels from j on.
        void scan(i64 t, i64 n, i64 j) const {
            const float* a = A + tile(j);
            float* s = S + tile(j);
            for (i64 i = 0; i < n; i++) {
                if (marked(c.resets, b, t + i))
                    for (i64 k = 0; k < c.N; k++) store(s + k * LANES, V{});
                V in = load<V>(x + i * GROUP + j), step = load<V>(dt + i * GROUP + j), u = step * in;
                V out = load<V>(D + j) * in;
                const float *B = write + i * work.ld, *C = read + i * work.ld;
                for (i64 k = 0; k < c.N; k++) {
                    V now = load<V>(s + k * LANES) * exponential(step * load<V>(a + k * LANES)) + u * B[k];
                    store(s + k * LANES, now);
                    out += now * C[k];
                }
                store(y + i * GROUP + j, out);
            }
        }

        void back() {
            turn_in(G, c.gs ? c.gs + place() : nullptr);
            std::memset(dA, 0, c.N * GROUP * sizeof(float));
            float* dD = work.skips + (b * work.groups + group) * GROUP;
            std::memset(dD, 0, GROUP * sizeof(float));
            for (i64 t = work.kept * c.keep; c.T && t >= 0; t -= c.keep) {
                i64 n = least(c.keep, c.T - t);
                if (t)
                    std::memcpy(S, state(t), c.N * GROUP * sizeof(float));
                else
                    turn_in(S, c.s ? c.s + place() : nullptr);
                ask(c.x, c.type, t - c.keep), ask(c.dt, FLOAT32, t - c.keep), ask(c.g, c.type, t - c.keep);
                fetch_piece(t, n);
                fetch_tokens(g, GROUP, c.g, c.type, t, n, c0, width);
                std::memset(d_write, 0, n * c.N * W * sizeof(float));
                std::memset(d_read, 0, n * c.N * W * sizeof(float));
                for (i64 j = 0; j < width; j += W) {
                    scan_again(t, n, j);
                    for (i64 i = n - 1; i >= 0; i--) token_back(i, j, dD);
                }
                if (c.valid.data)
                    for (i64 i = 0; i < n; i++)
                        if (!marked(c.valid, b, t + i)) std::memset(d_dt + i * GROUP, 0, GROUP * sizeof(float));
                DELIVER[c.type](dx, GROUP, at(c.dx, t, c.type, c0), c.dx.t, n, width, nullptr);
                deliver_rows(d_dt, GROUP, c.d_dt + (b * c.T + t) * c.C + c0, c.C, n, width);
                float* to = work.sums + ((group * 2 * c.B + b) * c.T + t) * c.N;
                sum_up(d_write, to, n * c.N), sum_up(d_read, to + c.B * c.T * c.N, n * c.N);
            }
            std::memcpy(work.rates + (b * work.groups + group) * c.N * GROUP, dA, c.N * GROUP * sizeof(float));
            if (c.ds) turn_out(G, c.ds + place());
        }
        // The states before the n tokens from t on, and their decays, of the W channels from j on.
        void scan_again(i64 t, i64 n, i64 j) const {
            const float* a = A + tile(j);
            float* s = S + tile(j);
            for (i64 i = 0; i < n; i++) {
                V step = load<V>(dt + i * GROUP + j), u = step * load<V>(x + i * GROUP + j);
                bool reset = marked(c.resets, b, t + i);
                const float* B = write + i * work.ld;
                for (i64 k = 0; k < c.N; k++) {
                    V then = reset ? V{} : load<V>(s + k * LANES), e = exponential(step * load<V>(a + k * LANES));
                    store(before + (i * c.N + k) * W, then);
                    store(decay + (i * c.N + k) * W, reset ? V{} : e);
                    store(s + k * LANES, then * e + u * B[k]);
                }
            }
        }
        void token_back(i64 i, i64 j, float* dD) const {
            V in = load<V>(x + i * GROUP + j), step = load<V>(dt + i * GROUP + j), u = step * in;
            V above = load<V>(g + i * GROUP + j), du = V{}, d_step = V{};
            const float *B = write + i * work.ld, *C = read + i * work.ld;
            for (i64 k = 0; k < c.N; k++) {
                i64 at = (i * c.N + k) * W, channel = tile(j) + k * LANES;
                V e = load<V>(decay + at), left = e * load<V>(before + at);
                V up = load<V>(G + channel) + above * C[k], q = up * left;
                store(d_read + at, load<V>(d_read + at) + above * (left + u * B[k]));
                store(d_write + at, load<V>(d_write + at) + up * u);
                store(dA + channel, load<V>(dA + channel) + q * step);
                store(G + channel, up * e);
                du += up * B[k], d_step += q * load<V>(A + channel);
            }
            store(dx + i * GROUP + j, du * step + above * load<V>(D + j));
            store(d_dt + i * GROUP + j, du * in + d_step);
            store(dD + j, load<V>(dD + j) + above * in);
        }
    };

    static void unit(void* context, i64 index, i64 worker) {
        const Work& work = *(const Work*)context;
        Taker take{work.own + worker * work.each, 0};
        Worker own(work, take);
        own.begin(index);
        if (work.backward)
            own.back();
        else
            own.forward();
    }

    void add_up() const {
        i64 count = c.B * c.T * c.N;
        if (count)  // without tokens there may be no memory
            std::memcpy(c.d_write, sums, count * sizeof(float)), std::memcpy(c.d_read, sums + count, count * sizeof(float));
        for (i64 i = 1; i < groups; i++)
            add_to(c.d_write, sums + 2 * i * count, count), add_to(c.d_read, sums + (2 * i + 1) * count, count);
        for (i64 b = 1; b < c.B; b++)
            add_to(rates, rates + b * groups * c.N * GROUP, groups * c.N * GROUP),
                add_to(skips, skips + b * groups * GROUP, groups * GROUP);
        for (i64 i = 0; i < c.C; i++) {
            c.d_skip[i] = skips[i];
            for (i64 k = 0; k < c.N; k++) c.d_a[i * c.N + k] = rates[i / LANES * LANES * c.N + k * LANES + i % LANES];
        }
    }
};

int compute(const Selective& c, bool backward) {
    if (!c.B || !c.C || !c.N) return 0;
    return Work(c, backward).run();
}

int forward(const Selective& c) { return compute(c, false); }
int backward(const Selective& c) { return compute(c, true); }

}  // namespace

namespace selective {

extern const SelectiveScan VARIANT;
const SelectiveScan VARIANT = {forward, backward};

}  // namespace selective
}  // namespace mnemos
