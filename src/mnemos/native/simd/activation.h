// What stands between matrices: GELU with its derivative, and the logistic function.
#pragma once
#include "simd/vector.h"

namespace mnemos {
namespace {

// Φ(x) and the normal density, each to a few units in the last place, also where Φ is tiny: the tail is
// e^(−x²/2)·P(u)/(1 + |x|), with u = (|x| − 4)/(|x| + 4), and Φ is one minus it on the other side. P is a least-squares
// fit reweighted towards the largest relative error, which is 2e-9.
struct Normal {
    V below, density;
};

ALWAYS Normal normal(V x) {
    V a = x < 0.0f ? -x : x;
    a = a > 14.5f ? all(14.5f) : a;  // beyond, the tail is 0
    V u = (a - 4.0f) / (a + 4.0f);
    V p = all(-7.161156202e-5f);
    p = p * u - 6.055714961e-5f;
    p = p * u + 6.928592173e-4f;
    p = p * u - 3.037599652e-4f;
    p = p * u - 5.004382401e-3f;
    p = p * u + 1.794020291e-2f;
    p = p * u - 3.219726950e-2f;
    p = p * u + 2.859998073e-2f;
    p = p * u + 1.399959614e-2f;
    p = p * u - 9.670346693e-2f;
    p = p * u + 4.720532069e-1f;
    // x² has more digits than a float, and an exponent's error is the power's relative one: a square that is exact, and
    // what it lacks, e^r with |r| < 0.11.
    V h = (V)((U)a & 0xfffff000u), r = (a - h) * (a + h) * -0.5f;
    V small = r * (1.0f / 24) + 1.0f / 6;
    small = small * r + 0.5f;
    small = small * r + 1.0f;
    small = small * r + 1.0f;
    V power = exponential(h * h * -0.5f) * small, tail = power * p / (a + 1.0f);
    return {x < 0.0f ? tail : 1.0f - tail, power * 0.398942280f};
}

ALWAYS V gelu(V x) { return x * normal(x).below; }

// 1/(1 + e^−x), to a few units in the last place also where it is tiny.
ALWAYS V logistic(V x) {
    V e = exponential(x < 0.0f ? x : -x), found = 1.0f / (1.0f + e);
    return x < 0.0f ? e * found : found;
}

}  // namespace
}  // namespace mnemos
