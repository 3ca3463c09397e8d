/* Quantized weights of GGUF files, multiplied out.
 *
 * A block is 32 weights, or 256 in the types whose names end in K, with its scales. A weight is the
 * product of its number and its scale, less a minimum in types that have one. All is computed in
 * float32 and rounded as the package gguf rounds it, so products and differences must not be fused
 * (-ffp-contract=off).
 */
#include <stdint.h>
#include <string.h>

static inline float from_f16(const uint8_t *at) {
    uint16_t half;
    memcpy(&half, at, 2);
    uint32_t rest = half & 0x7fff, bits = rest << 13;
    float value;
    memcpy(&value, &bits, 4);
    value *= 0x1p112f; /* exponents of both formats differ by 112 */
    memcpy(&bits, &value, 4);
    if (rest >= 0x7c00) bits = 0x7f800000 | rest << 13; /* not finite */
    bits |= (uint32_t)(half & 0x8000) << 16;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* Blocks of 32: a scale, a minimum in some types, the fifth bits in others, and numbers. */
static inline __attribute__((always_inline)) void small_block(
    const uint8_t *from, int fifth, int minimum, int zero, float *to
) {
    const float scale = from_f16(from), offset = minimum ? from_f16(from + 2) : 0;
    const uint8_t *numbers = from + (minimum ? 4 : 2) + (fifth ? 4 : 0);
    uint32_t high = 0;
    if (fifth) memcpy(&high, numbers - 4, 4);
    for (int k = 0; k < 16; k++) {
        const int low = (numbers[k] & 15) | ((high >> k) & 1) << 4;
        const int top = (numbers[k] >> 4) | ((high >> (k + 16)) & 1) << 4;
        to[k] = scale * (float)(low - zero) + offset;
        to[k + 16] = scale * (float)(top - zero) + offset;
    }
}

static void q4_0(const uint8_t *from, float *to) { small_block(from, 0, 0, 8, to); }
static void q4_1(const uint8_t *from, float *to) { small_block(from, 0, 1, 0, to); }
static void q5_0(const uint8_t *from, float *to) { small_block(from, 1, 0, 16, to); }
static void q5_1(const uint8_t *from, float *to) { small_block(from, 1, 1, 0, to); }

static void q8_0(const uint8_t *from, float *to) {
    const float scale = from_f16(from);
    for (int k = 0; k < 32; k++) to[k] = scale * (float)(int8_t)from[2 + k];
}

/* Blocks of 256 in eight parts, whose scales and minima have 6 bits. */
static inline __attribute__((always_inline)) void large_block(
    const uint8_t *from, int fifth, float *to
) {
    const float scale = from_f16(from), minimum = from_f16(from + 2);
    const uint8_t *six = from + 4, *high = from + 16, *numbers = from + (fifth ? 48 : 16);
    for (int part = 0; part < 8; part++) {
        int factor, least;
        if (part < 4) {
            factor = six[part] & 63;
            least = six[part + 4] & 63;
        } else {
            factor = (six[part + 4] & 15) | (six[part - 4] >> 6) << 4;
            least = (six[part + 4] >> 4) | (six[part] >> 6) << 4;
        }
        const float d = scale * (float)factor, m = minimum * (float)least;
        for (int k = 0; k < 32; k++) {
            int number = (numbers[32 * (part / 2) + k] >> (4 * (part % 2))) & 15;
            if (fifth) number |= ((high[k] >> part) & 1) << 4;
            to[32 * part + k] = d * (float)number - m;
        }
    }
}

static void q4_k(const uint8_t *from, float *to) { large_block(from, 0, to); }
static void q5_k(const uint8_t *from, float *to) { large_block(from, 1, to); }

static void q6_k(const uint8_t *from, float *to) {
    const float scale = from_f16(from + 208);
    for (int part = 0; part < 8; part++) { /* two halves of four parts of 32 */
        const int half = part / 4, quarter = part % 4;
        const uint8_t *low = from + 64 * half + 32 * (quarter % 2);
        const uint8_t *high = from + 128 + 32 * half;
        const int8_t *factors = (const int8_t *)from + 192 + 2 * part;
        for (int k = 0; k < 32; k++) {
            const float d = scale * (float)factors[k / 16];
            const int number = ((low[k] >> (4 * (quarter / 2))) & 15)
                               | ((high[k] >> (2 * quarter)) & 3) << 4;
            to[32 * part + k] = d * (float)(number - 32);
        }
    }
}

static const struct {
    int type, weights, bytes; /* number of the type in GGUF files, weights and bytes of a block */
    void (*multiply_out)(const uint8_t *, float *);
} TYPES[] = {
    {2, 32, 18, q4_0},   {3, 32, 20, q4_1},    {6, 32, 22, q5_0},    {7, 32, 24, q5_1},
    {8, 32, 34, q8_0},   {12, 256, 144, q4_k}, {13, 256, 176, q5_k}, {14, 256, 210, q6_k},
};

/* Blocks of a type, as out in bfloat16 or float32. Returns whether the type is known. */
int gguf_dequantize(
    int type, const uint8_t *from, int64_t blocks, void *out, int bf16, int threads
) {
    const int count = sizeof TYPES / sizeof *TYPES;
    int found = 0;
    while (found < count && TYPES[found].type != type) found++;
    if (found == count) return 0;
    const int weights = TYPES[found].weights, bytes = TYPES[found].bytes;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t b = 0; b < blocks; b++) {
        float values[256];
        TYPES[found].multiply_out(from + b * bytes, values);
        if (bf16)
            for (int k = 0; k < weights; k++)
                ((uint16_t *)out)[b * weights + k] = to_bf16(values[k]);
        else
            memcpy((float *)out + b * weights, values, weights * sizeof(float));
    }
    return 1;
}
