// Float vectors of the machine's width and the one inner kernel of cpu_kernels.cpp: dot products of a tile of rows.
//
// Multiply-adds are written out as fmadd() and the file is compiled with -ffp-contract=off, so that no compiler fuses them
// in one place and not in another: an element is summed in one order, given by the length of the sum and the machine alone.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, MAX_ROWS = 6;  // MAX_ROWS: rows of x in one tile, so that 4 x MAX_ROWS sums stay in registers
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int LANES = 8, MAX_ROWS = 2;
#elif defined(__aarch64__)
constexpr int LANES = 4, MAX_ROWS = 5;
#else
constexpr int LANES = 4, MAX_ROWS = 2;
#endif
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
constexpr int GROUP = 4;   // weight rows (or tokens) in one tile
constexpr int TOKENS = 16; // tokens in one block of attention

inline vec fmadd(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__) && defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

inline vec splat(float value) { return value - vec{}; }  // minus zero: nothing is left to compute
inline vec load(const float* from) { vec v; std::memcpy(&v, from, sizeof v); return v; }
inline void store(float* to, vec v) { std::memcpy(to, &v, sizeof v); }
inline vec load_some(const float* from, int64_t count) {  // the rest is zero
    vec v = {};
    std::memcpy(&v, from, count * sizeof(float));
    return v;
}
inline void store_some(float* to, vec v, int64_t count) { std::memcpy(to, &v, std::min<int64_t>(count, LANES) * sizeof(float)); }
// Calls one(k, get, put) for k = 0, LANES, ... below size; get and put move a vector, or what is left of it at the end.
template <class One>
inline void for_vectors(int64_t size, One one) {
    int64_t k = 0;
    for (; k + LANES <= size; k += LANES) one(k, load, store);
    const int64_t rest = size - k;
    if (rest > 0) one(k, [rest](const float* from) { return load_some(from, rest); }, [rest](float* to, vec v) { store_some(to, v, rest); });
}

template <int... I>
inline vec shuffle(vec a, vec b, std::integer_sequence<int, I...>) {
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(a, b, I...);
#else
    return __builtin_shuffle(a, b, ivec{I...});
#endif
}

// Index of output lane i of fold<S>: a and b hold segments of S lanes; taken is the first or second half of each.
template <int S, int Half>
constexpr int half_index(int i) {
    return (i / (S / 2)) * S + i % (S / 2) + Half * (S / 2);
}
template <int S, int Half, int... I>
inline vec halves(vec a, vec b, std::integer_sequence<int, I...>) {
    return shuffle(a, b, std::integer_sequence<int, half_index<S, Half>(I)...>{});
}
// Segments of S lanes become segments of S/2: first half + second half of each; those of a come before those of b.
template <int S>
inline vec fold(vec a, vec b) {
    using Lanes = std::make_integer_sequence<int, LANES>;
    return halves<S, 0>(a, b, Lanes{}) + halves<S, 1>(a, b, Lanes{});
}
template <int S>
inline vec fold_down(vec v) {
    if constexpr (S >= 2) return fold_down<S / 2>(fold<S>(v, v));
    else return v;
}
// Lanes 0..3: the sums of a, b, c and d over their lanes, each in the same order.
inline vec sums_of_four(vec a, vec b, vec c, vec d) {
    return fold_down<LANES / 4>(fold<LANES / 2>(fold<LANES>(a, b), fold<LANES>(c, d)));
}
inline float sum_of(vec v) { return fold_down<LANES>(v)[0]; }
template <int S>
inline vec fold_down_max(vec v) {
    using Lanes = std::make_integer_sequence<int, LANES>;
    if constexpr (S >= 2) {
        const vec low = halves<S, 0>(v, v, Lanes{}), high = halves<S, 1>(v, v, Lanes{});
        return fold_down_max<S / 2>(low > high ? low : high);
    } else {
        return v;
    }
}
inline float max_of(vec v) { return fold_down_max<LANES>(v)[0]; }

// exp for x <= ~88, relative error about 1e-7; 0 below -87. Coefficients: Cephes expf.
inline vec exp_of(vec x) {
    const vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    const vec shifted = fmadd(x, splat(1.44269504088896341f), magic);
    const vec n = shifted - magic;
    vec r = fmadd(n, splat(-0.693359375f), x);
    r = fmadd(n, splat(2.12194440e-4f), r);
    vec p = splat(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) p = fmadd(p, r, splat(c));
    p = fmadd(p, r * r, r + splat(1.0f));
    const ivec scaled = (ivec)p + (((ivec)shifted - (ivec)magic) << 23);
    return x < splat(-87.0f) ? vec{} : (vec)scaled;
}

// Keeps v in a register: GCC would otherwise load it again for each of its multiply-adds (a tenth of the speed).
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#define KEEP(v) asm("" : "+v"(v))
#else
#define KEEP(v)
#endif

// ---- the one inner kernel: out[r * out_stride + i] = x row r . w[i], i < 4, r < Rows ----
template <int Rows, int Ahead>
void dot_tile(const float* const* w, const float* x, int64_t x_stride, int64_t length, const float* ahead, float* out, int64_t out_stride) {
    vec sum[Rows][GROUP] = {};
    const float *w0 = w[0], *w1 = w[1], *w2 = w[2], *w3 = w[3];
    auto step = [&](vec a, vec b, vec c, vec d, auto row) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
            vec v = row(x + r * x_stride);
            KEEP(v);
            sum[r][0] = fmadd(a, v, sum[r][0]);
            sum[r][1] = fmadd(b, v, sum[r][1]);
            sum[r][2] = fmadd(c, v, sum[r][2]);
            sum[r][3] = fmadd(d, v, sum[r][3]);
        }
    };
    int64_t k = 0;
    for (; k + LANES <= length; k += LANES) {
#pragma GCC unroll 4
        for (int i = 0; i < Ahead; ++i) __builtin_prefetch(ahead + i * length + k, 0, 2);
        step(load(w0 + k), load(w1 + k), load(w2 + k), load(w3 + k), [k](const float* row) __attribute__((always_inline)) { return load(row + k); });
    }
    if (const int64_t rest = length - k; rest > 0) {
        auto some = [k, rest](const float* row) __attribute__((always_inline)) { return load_some(row + k, rest); };
        step(some(w0), some(w1), some(w2), some(w3), some);
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
        const vec sums = sums_of_four(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
        std::memcpy(out + r * out_stride, &sums, GROUP * sizeof(float));
    }
}

typedef void (*DotTile)(const float* const*, const float*, int64_t, int64_t, const float*, float*, int64_t);
template <int Ahead, int... R>
DotTile pick_tile(int rows, std::integer_sequence<int, R...>) {
    static const DotTile tiles[] = {dot_tile<R + 1, Ahead>...};
    return tiles[rows - 1];
}
// Tile of `rows` rows that prefetches `ahead` (0, 1, 2 or 4) weight rows.
inline DotTile tile_for(int64_t rows, int ahead) {
    const auto sizes = std::make_integer_sequence<int, MAX_ROWS>{};
    if (ahead == 4) return pick_tile<4>((int)rows, sizes);
    if (ahead == 2) return pick_tile<2>((int)rows, sizes);
    return ahead == 1 ? pick_tile<1>((int)rows, sizes) : pick_tile<0>((int)rows, sizes);
}

}  // namespace
