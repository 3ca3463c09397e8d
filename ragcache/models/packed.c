/* Products with weights in 4 and 8 bits, for steps of few rows.
 *
 * A weight [outputs, inputs] is kept in tiles of 16 outputs by 32 inputs, all inputs of 16 outputs
 * one after another. A group, the 32 inputs of one output, has a scale, in 4 bits also a zero:
 *     4 bits: weight = (number - 8) * scale + zero       8 bits: weight = (number - 128) * scale
 * Byte 4 * o + j of the n-th 64 bytes of a tile holds output o and
 *     4 bits: input 8 * n + j below, input 8 * n + 4 + j above       8 bits: input 4 * n + j
 * so that a word of every output meets the same four inputs, as the dot products of processors
 * take them. Scales, then zeros, of a tile are 16 numbers in bfloat16.
 *
 * Activations are rounded to 8 bits with a scale for each group. Sums over a group are whole
 * numbers, and exact. A row with a number that is not finite has no finite product.
 */
#include <stdint.h>
#include <string.h>
#include <math.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define TILE 16
#define GROUP 32
#define BLOCK 8 /* rows that share one reading of a tile */

static inline float from_bf16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline float nearest(float value) { /* to even, for numbers below 2^22 */
    return (value + 12582912.0f) - 12582912.0f;
}

static inline float read(const void *data, int64_t at, int bf16) {
    return bf16 ? from_bf16(((const uint16_t *)data)[at]) : ((const float *)data)[at];
}

/* Rounded activations: numbers [rows, inputs], scales and sums [rows, groups]. */
struct rounded {
    int8_t *numbers;
    float *scales;
    int32_t *sums;
};

static void round_group(const float *from, int8_t *numbers, float *scale, int32_t *sum) {
    float most = 0, finite = 0; /* `finite` is 0, or NaN if one of them is not finite */
#pragma omp simd reduction(max : most)
    for (int k = 0; k < GROUP; k++) most = fmaxf(most, fabsf(from[k]));
#pragma omp simd reduction(+ : finite)
    for (int k = 0; k < GROUP; k++) finite += from[k] * 0.0f;
    float inverse = most > 0 ? 127.0f / most : 0.0f;
    int32_t total = 0;
#pragma omp simd reduction(+ : total)
    for (int k = 0; k < GROUP; k++) {
        int32_t number = (int32_t)nearest(from[k] * inverse);
        numbers[k] = (int8_t)number;
        total += number;
    }
    *scale = most / 127.0f + finite;
    *sum = total;
}

static void round_rows(const void *rows, int bf16, int64_t count, int64_t inputs, struct rounded x) {
    int64_t groups = count * inputs / GROUP;
    for (int64_t g = 0; g < groups; g++) {
        float from[GROUP];
        if (bf16)
            for (int k = 0; k < GROUP; k++) from[k] = from_bf16(((const uint16_t *)rows)[g * GROUP + k]);
        else
            memcpy(from, (const float *)rows + g * GROUP, sizeof from);
        round_group(from, x.numbers + g * GROUP, x.scales + g, x.sums + g);
    }
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

static inline __m512 halves(const uint16_t *from) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

static inline __attribute__((always_inline)) void tile(
    int bits, int count, const uint8_t *weight, const uint16_t *scales, int64_t groups,
    struct rounded x, float *out /* [count, TILE] */
) {
    const __m512i low = _mm512_set1_epi8(15);
    const int bytes = TILE * GROUP * bits / 8;
    __m512 total[BLOCK];
    for (int m = 0; m < count; m++) total[m] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; g++) {
        __m512i words[8];
        if (bits == 4)
            for (int n = 0; n < 4; n++) {
                __m512i both = _mm512_loadu_si512(weight + 64 * n);
                words[2 * n] = _mm512_and_si512(both, low);
                words[2 * n + 1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
            }
        else
            for (int n = 0; n < 8; n++) words[n] = _mm512_loadu_si512(weight + 64 * n);
        __m512 scale = halves(scales), zero = bits == 4 ? halves(scales + TILE) : scale;
        for (int m = 0; m < count; m++) {
            const int64_t at = m * groups + g;
            const int32_t sum = x.sums[at];
            const int32_t *four = (const int32_t *)(x.numbers + at * GROUP);
            __m512i dot = _mm512_set1_epi32(-(bits == 4 ? 8 : 128) * sum);
            for (int n = 0; n < 8; n++)
                dot = _mm512_dpbusd_epi32(dot, words[n], _mm512_set1_epi32(four[n]));
            __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(dot), scale);
            if (bits == 4) value = _mm512_fmadd_ps(zero, _mm512_set1_ps((float)sum), value);
            total[m] = _mm512_fmadd_ps(value, _mm512_set1_ps(x.scales[at]), total[m]);
        }
        weight += bytes;
        scales += bits == 4 ? 2 * TILE : TILE;
    }
    for (int m = 0; m < count; m++) _mm512_storeu_ps(out + m * TILE, total[m]);
}

#elif defined(__AVX2__)

static inline __m256 halves(const uint16_t *from) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

/* Half a tile: 8 outputs. Four rows at most keep their sums in registers. */
static inline __attribute__((always_inline)) void half_tile(
    int bits, int count, const uint8_t *weight, const uint16_t *scales, int64_t groups,
    struct rounded x, float *out
) {
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    const int bytes = TILE * GROUP * bits / 8;
    __m256 total[4];
    for (int m = 0; m < count; m++) total[m] = _mm256_setzero_ps();
    for (int64_t g = 0; g < groups; g++) {
        __m256i dot[4];
        for (int m = 0; m < count; m++) dot[m] = _mm256_setzero_si256();
        for (int n = 0; n < bits; n++) {
            __m256i both = _mm256_loadu_si256((const __m256i *)(weight + 64 * n));
            if (bits == 4) {
                __m256i below = _mm256_and_si256(both, low);
                __m256i above = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
                for (int m = 0; m < count; m++) { /* 16 products of 15 * 127 fit 16 bits */
                    const int32_t *four =
                        (const int32_t *)(x.numbers + (m * groups + g) * GROUP) + 2 * n;
                    __m256i pair = _mm256_add_epi16(
                        _mm256_maddubs_epi16(below, _mm256_set1_epi32(four[0])),
                        _mm256_maddubs_epi16(above, _mm256_set1_epi32(four[1])));
                    dot[m] = _mm256_add_epi16(dot[m], pair);
                }
            } else {
                __m256i number = _mm256_xor_si256(both, _mm256_set1_epi8(-128));
                __m256i size = _mm256_abs_epi8(number);
                for (int m = 0; m < count; m++) {
                    const int32_t *four = (const int32_t *)(x.numbers + (m * groups + g) * GROUP);
                    __m256i other = _mm256_sign_epi8(_mm256_set1_epi32(four[n]), number);
                    __m256i pair = _mm256_maddubs_epi16(size, other);
                    dot[m] = _mm256_add_epi32(dot[m], _mm256_madd_epi16(pair, ones));
                }
            }
        }
        __m256 scale = halves(scales), zero = scale;
        if (bits == 4) /* of number - 8 */
            zero = _mm256_fnmadd_ps(_mm256_set1_ps(8), scale, halves(scales + TILE));
        for (int m = 0; m < count; m++) {
            const int64_t at = m * groups + g;
            __m256i whole = bits == 4 ? _mm256_madd_epi16(dot[m], ones) : dot[m];
            __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(whole), scale);
            if (bits == 4) value = _mm256_fmadd_ps(zero, _mm256_set1_ps((float)x.sums[at]), value);
            total[m] = _mm256_fmadd_ps(value, _mm256_set1_ps(x.scales[at]), total[m]);
        }
        weight += bytes;
        scales += bits == 4 ? 2 * TILE : TILE;
    }
    for (int m = 0; m < count; m++) _mm256_storeu_ps(out + m * TILE, total[m]);
}

static inline __attribute__((always_inline)) void tile(
    int bits, int count, const uint8_t *weight, const uint16_t *scales, int64_t groups,
    struct rounded x, float *out
) {
    for (int begin = 0; begin < count; begin += 4) {
        const int most = count - begin < 4 ? count - begin : 4;
        struct rounded y = {x.numbers + begin * groups * GROUP, x.scales + begin * groups,
                            x.sums + begin * groups};
        for (int half = 0; half < 2; half++)
            half_tile(bits, most, weight + 32 * half, scales + 8 * half, groups, y,
                      out + begin * TILE + 8 * half);
    }
}

#else

static inline __attribute__((always_inline)) void tile(
    int bits, int count, const uint8_t *weight, const uint16_t *scales, int64_t groups,
    struct rounded x, float *out
) {
    const int bytes = TILE * GROUP * bits / 8;
    memset(out, 0, sizeof(float) * count * TILE);
    for (int64_t g = 0; g < groups; g++, weight += bytes, scales += bits == 4 ? 2 * TILE : TILE)
        for (int m = 0; m < count; m++) {
            const int64_t at = m * groups + g;
            const int8_t *four = x.numbers + at * GROUP;
            int32_t dot[TILE] = {0};
            for (int n = 0; n < bits; n++)
                for (int o = 0; o < TILE; o++)
                    for (int j = 0; j < 4; j++) {
                        const uint8_t both = weight[64 * n + 4 * o + j];
                        if (bits == 4)
                            dot[o] += (both & 15) * four[8 * n + j] + (both >> 4) * four[8 * n + 4 + j];
                        else
                            dot[o] += (int8_t)(both ^ 128) * four[4 * n + j];
                    }
            for (int o = 0; o < TILE; o++) {
                const float scale = from_bf16(scales[o]);
                float value = scale * dot[o];
                if (bits == 4) value += (from_bf16(scales[TILE + o]) - 8 * scale) * x.sums[at];
                out[m * TILE + o] += value * x.scales[at];
            }
        }
}

#endif

static __attribute__((noinline)) void tile_rows(
    int bits, int64_t count, const uint8_t *weight, const uint16_t *scales, int64_t groups,
    struct rounded x, float *out
) {
#define CASE(N)                                                                  \
    case N:                                                                      \
        if (bits == 4) tile(4, N, weight, scales, groups, x, out);               \
        else tile(8, N, weight, scales, groups, x, out);                         \
        break;
    switch (count) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) }
}

/* out [rows, outputs] = rows [rows, inputs] * weight^T, both in bfloat16 or in float32.
 * work: rows * inputs bytes, then rows * groups scales and sums of 4 bytes. */
void packed_product(
    int bits, const uint8_t *weight, const uint16_t *scales, int64_t outputs, int64_t inputs,
    const void *rows, void *out, int64_t count, int bf16, uint8_t *work, int threads
) {
    const int64_t groups = inputs / GROUP, tiles = (outputs + TILE - 1) / TILE;
    const int64_t bytes = groups * TILE * GROUP * bits / 8;
    const int64_t halves = groups * (bits == 4 ? 2 * TILE : TILE);
    struct rounded x = {(int8_t *)work, (float *)(work + count * inputs),
                        (int32_t *)(work + count * inputs + 4 * count * groups)};
    round_rows(rows, bf16, count, inputs, x);
    int64_t chunk = tiles / (threads * 8);
    if (chunk < 1) chunk = 1;
#pragma omp parallel for num_threads(threads) schedule(dynamic, chunk) if (threads > 1)
    for (int64_t t = 0; t < tiles; t++) {
        const int64_t width = outputs - t * TILE < TILE ? outputs - t * TILE : TILE;
        for (int64_t begin = 0; begin < count; begin += BLOCK) {
            const int64_t most = count - begin < BLOCK ? count - begin : BLOCK;
            struct rounded y = {x.numbers + begin * inputs, x.scales + begin * groups,
                                x.sums + begin * groups};
            float part[BLOCK * TILE];
            tile_rows(bits, most, weight + t * bytes, scales + t * halves, groups, y, part);
            for (int64_t m = 0; m < most; m++) {
                const int64_t at = (begin + m) * outputs + t * TILE;
                if (bf16)
                    for (int64_t o = 0; o < width; o++)
                        ((uint16_t *)out)[at + o] = to_bf16(part[m * TILE + o]);
                else
                    memcpy((float *)out + at, part + m * TILE, width * sizeof(float));
            }
        }
    }
}

static inline __attribute__((always_inline)) void unpack_group(
    int bits, const uint8_t *from, float scale, float zero, float *values
) {
    uint8_t numbers[GROUP];
    if (bits == 4)
        for (int n = 0; n < 4; n++) {
            uint32_t word;
            memcpy(&word, from + 64 * n, 4);
            const uint32_t below = word & 0x0f0f0f0f, above = (word >> 4) & 0x0f0f0f0f;
            memcpy(numbers + 8 * n, &below, 4);
            memcpy(numbers + 8 * n + 4, &above, 4);
        }
    else
        for (int n = 0; n < 8; n++) memcpy(numbers + 4 * n, from + 64 * n, 4);
    const float offset = bits == 4 ? zero - 8 * scale : -128 * scale;
    for (int k = 0; k < GROUP; k++) values[k] = numbers[k] * scale + offset;
}

/* Tiles begin to end of a weight, as out [16 * (end - begin), inputs] in bfloat16 or float32. */
void packed_unpack(
    int bits, const uint8_t *weight, const uint16_t *scales, int64_t inputs, int64_t begin,
    int64_t end, void *out, int bf16, int threads
) {
    const int64_t groups = inputs / GROUP, bytes = TILE * GROUP * bits / 8;
    const int each = bits == 4 ? 2 * TILE : TILE;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t t = begin; t < end; t++)
        for (int64_t g = 0; g < groups; g++) {
            const uint8_t *from = weight + (t * groups + g) * bytes;
            const uint16_t *of = scales + (t * groups + g) * each;
            for (int o = 0; o < TILE; o++) {
                float values[GROUP];
                const int64_t at = ((t - begin) * TILE + o) * inputs + g * GROUP;
                if (bits == 4)
                    unpack_group(4, from + 4 * o, from_bf16(of[o]), from_bf16(of[TILE + o]), values);
                else
                    unpack_group(8, from + 4 * o, from_bf16(of[o]), 0, values);
                if (bf16)
                    for (int k = 0; k < GROUP; k++) ((uint16_t *)out)[at + k] = to_bf16(values[k]);
                else
                    memcpy((float *)out + at, values, sizeof values);
            }
        }
}

static float try_grid(const float *from, float scale, float zero, uint8_t *numbers) {
    float error = 0;
    const float inverse = 1 / scale;
#pragma omp simd reduction(+ : error)
    for (int k = 0; k < GROUP; k++) {
        float number = nearest((from[k] - zero) * inverse + 8);
        number = number < 0 ? 0 : number > 15 ? 15 : number;
        numbers[k] = (uint8_t)number;
        const float off = (number - 8) * scale + zero - from[k];
        error += off * off;
    }
    return error;
}

/* A group in 4 bits, by the grid with the least error of four: stored weights lie on a grid of 15
 * steps, of which a group may leave out the first or the last ones. */
static float pack_group4(const float *from, uint8_t *numbers, uint16_t *scale, uint16_t *zero) {
    float least = from[0], most = from[0], best = INFINITY;
    for (int k = 1; k < GROUP; k++) {
        least = fminf(least, from[k]);
        most = fmaxf(most, from[k]);
    }
    for (int steps = 15; steps >= 12; steps--) {
        uint8_t tried[GROUP];
        float wide = (most - least) / steps;
        const uint16_t s = to_bf16(wide > 1e-30f ? wide : 1e-30f);
        const uint16_t z = to_bf16(least + 8 * from_bf16(s));
        const float error = try_grid(from, from_bf16(s), from_bf16(z), tried);
        if (error < best) {
            best = error;
            *scale = s;
            *zero = z;
            memcpy(numbers, tried, GROUP);
        }
    }
    return best;
}

static float pack_group8(const float *from, uint8_t *numbers, uint16_t *scale) {
    float most = 1e-30f, error = 0;
#pragma omp simd reduction(max : most)
    for (int k = 0; k < GROUP; k++) most = fmaxf(most, fabsf(from[k]));
    *scale = to_bf16(most / 127);
    const float exact = from_bf16(*scale), inverse = 1 / exact;
#pragma omp simd reduction(+ : error)
    for (int k = 0; k < GROUP; k++) {
        float number = nearest(from[k] * inverse);
        number = number < -127 ? -127 : number > 127 ? 127 : number;
        numbers[k] = (uint8_t)(int)(number + 128);
        const float off = number * exact - from[k];
        error += off * off;
    }
    return error;
}

/* Packs a weight [outputs, inputs]. Returns the sum of squared errors. */
double packed_pack(
    int bits, const void *from, int bf16, int64_t outputs, int64_t inputs, uint8_t *weight,
    uint16_t *scales, int threads
) {
    const int64_t groups = inputs / GROUP, tiles = (outputs + TILE - 1) / TILE;
    const int64_t bytes = TILE * GROUP * bits / 8;
    const int each = bits == 4 ? 2 * TILE : TILE;
    double error = 0;
#pragma omp parallel for num_threads(threads) schedule(dynamic) reduction(+ : error) if (threads > 1)
    for (int64_t t = 0; t < tiles; t++)
        for (int64_t g = 0; g < groups; g++) {
            uint8_t *to = weight + (t * groups + g) * bytes;
            uint16_t *of = scales + (t * groups + g) * each;
            memset(to, 0, bytes);
            memset(of, 0, 2 * each);
            for (int o = 0; o < TILE && t * TILE + o < outputs; o++) {
                float values[GROUP];
                uint8_t numbers[GROUP];
                const int64_t at = (t * TILE + o) * inputs + g * GROUP;
                for (int k = 0; k < GROUP; k++) values[k] = read(from, at + k, bf16);
                if (bits == 4) {
                    error += pack_group4(values, numbers, of + o, of + TILE + o);
                    for (int k = 0; k < GROUP; k++)
                        to[64 * (k / 8) + 4 * o + k % 4] |= numbers[k] << (k & 4);
                } else {
                    error += pack_group8(values, numbers, of + o);
                    for (int k = 0; k < GROUP; k++) to[64 * (k / 4) + 4 * o + k % 4] = numbers[k];
                }
            }
        }
    return error;
}
