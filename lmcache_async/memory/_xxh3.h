/* XXH3 with 128 bits, default secret and no seed, for long input of known length in whole stripes.
 *
 * Algorithm and constants follow the specification, doc/xxhash_spec.md in github.com/Cyan4973/xxHash; tests
 * compare every length with the library. Unlike the library, this hashes the bytes in the registers of a
 * copy, so that they are read from memory only once.
 */

#ifndef LMCACHE_ASYNC_XXH3_H
#define LMCACHE_ASYNC_XXH3_H

#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define STRIPE 64
#define LANES 8
#define STRIPES_A_BLOCK 16
#define MIN_DIGEST_BYTES 256 /* inputs of up to 240 bytes use another algorithm */

#define PRIME32_1 0x9E3779B1U
#define PRIME32_2 0x85EBCA77U
#define PRIME32_3 0xC2B2AE3DU
#define PRIME64_1 0x9E3779B185EBCA87ULL
#define PRIME64_2 0xC2B2AE3D27D4EB4FULL
#define PRIME64_3 0x165667B19E3779F9ULL
#define PRIME64_4 0x85EBCA77C2B2AE63ULL
#define PRIME64_5 0x27D4EB2F165667C5ULL
#define PRIME_MX1 0x165667919E3779F9ULL

static const uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};
#define SCRAMBLE_KEY (SECRET + sizeof SECRET - STRIPE)
#define LAST_KEY (SCRAMBLE_KEY - 7)
#define LOW_KEY (SECRET + 11)
#define HIGH_KEY (SCRAMBLE_KEY - 11)

/* State of one digest; stored as plain bytes between calls. */
typedef struct {
    uint64_t lanes[LANES];
    uint64_t done, total; /* stripes */
} Digest;

static void
digest_start(Digest *digest, uint64_t num_bytes)
{
    const uint64_t lanes[LANES] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                   PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    memcpy(digest->lanes, lanes, sizeof lanes);
    digest->done = 0;
    digest->total = num_bytes / STRIPE;
}

/* Part of the secret for stripe number `index`; the last stripe has a separate one. */
static inline const uint8_t *
stripe_key(uint64_t total, uint64_t index)
{
    return index + 1 == total ? LAST_KEY : SECRET + index % STRIPES_A_BLOCK * 8;
}

/* Whether lanes are scrambled after stripe number `index`: at the end of a block, never after the last stripe. */
static inline int
ends_block(uint64_t total, uint64_t index)
{
    return index % STRIPES_A_BLOCK == STRIPES_A_BLOCK - 1 && index + 1 != total;
}

static inline uint64_t
read_lane(const uint8_t *from)
{
    uint64_t value = 0;
    for (int i = 7; i >= 0; i--)
        value = value << 8 | from[i];
    return value;
}

#if defined(__SSE2__)

typedef struct {
    __m128i part[4];
} Lanes;

static inline Lanes
load_stripe(const void *from)
{
    const __m128i *source = from;
    return (Lanes){{_mm_loadu_si128(source), _mm_loadu_si128(source + 1), _mm_loadu_si128(source + 2),
                    _mm_loadu_si128(source + 3)}};
}

static inline void
store_stripe(void *to, const Lanes *lanes, int stream)
{
    __m128i *target = to;
    for (int i = 0; i < 4; i++) {
        if (stream)
            _mm_stream_si128(target + i, lanes->part[i]);
        else
            _mm_storeu_si128(target + i, lanes->part[i]);
    }
}

static inline void
mix(Lanes *lanes, const Lanes *input, const uint8_t *key)
{
    for (int i = 0; i < 4; i++) {
        __m128i value = input->part[i];
        __m128i keyed = _mm_xor_si128(value, _mm_loadu_si128((const __m128i *)key + i));
        __m128i product = _mm_mul_epu32(keyed, _mm_srli_epi64(keyed, 32));
        __m128i swapped = _mm_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
        lanes->part[i] = _mm_add_epi64(lanes->part[i], _mm_add_epi64(product, swapped));
    }
}

static inline void
scramble(Lanes *lanes)
{
    const __m128i prime = _mm_set1_epi32((int)PRIME32_1);
    for (int i = 0; i < 4; i++) {
        __m128i value = _mm_xor_si128(lanes->part[i], _mm_srli_epi64(lanes->part[i], 47));
        value = _mm_xor_si128(value, _mm_loadu_si128((const __m128i *)SCRAMBLE_KEY + i));
        __m128i high = _mm_slli_epi64(_mm_mul_epu32(_mm_srli_epi64(value, 32), prime), 32);
        lanes->part[i] = _mm_add_epi64(_mm_mul_epu32(value, prime), high);
    }
}

#else

typedef struct {
    uint64_t part[LANES];
} Lanes;

static inline Lanes
load_stripe(const void *from)
{
    Lanes lanes;
    memcpy(lanes.part, from, STRIPE);
    return lanes;
}

static inline void
store_stripe(void *to, const Lanes *lanes, int stream)
{
    (void)stream;
    memcpy(to, lanes->part, STRIPE);
}

static inline void
mix(Lanes *lanes, const Lanes *input, const uint8_t *key)
{
    for (int i = 0; i < LANES; i++) {
        uint64_t value = read_lane((const uint8_t *)(input->part + i)), keyed = value ^ read_lane(key + 8 * i);
        lanes->part[i ^ 1] += value;
        lanes->part[i] += (keyed & 0xFFFFFFFFU) * (keyed >> 32);
    }
}

static inline void
scramble(Lanes *lanes)
{
    for (int i = 0; i < LANES; i++) {
        uint64_t value = lanes->part[i] ^ lanes->part[i] >> 47;
        lanes->part[i] = (value ^ read_lane(SCRAMBLE_KEY + 8 * i)) * PRIME32_1;
    }
}

#endif

/* Copy whole stripes and update the digest. With stream, `to` must be aligned to 16 bytes. */
static inline void
copy_digesting(uint8_t *to, const uint8_t *from, size_t n, Digest *digest, size_t ahead, int stream)
{
    const uint64_t total = digest->total;
    uint64_t index = digest->done;
    Lanes lanes; /* a local copy: `to` might alias digest->lanes, which would be reloaded after each store */
    memcpy(&lanes, digest->lanes, sizeof lanes);
    for (size_t at = 0; at < n; at += STRIPE, index++) {
#if defined(__SSE2__)
        _mm_prefetch((const char *)(from + at + ahead), _MM_HINT_NTA);
#else
        (void)ahead;
#endif
        Lanes stripe = load_stripe(from + at);
        store_stripe(to + at, &stripe, stream);
        mix(&lanes, &stripe, stripe_key(total, index));
        if (ends_block(total, index))
            scramble(&lanes);
    }
    memcpy(digest->lanes, &lanes, sizeof lanes);
    digest->done = index;
}

/* XOR of the two halves of the 128-bit product. */
static uint64_t
fold(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t
merge(const Digest *digest, const uint8_t *key, uint64_t start)
{
    uint64_t value = start;
    for (int i = 0; i < LANES; i += 2, key += 16)
        value += fold(digest->lanes[i] ^ read_lane(key), digest->lanes[i + 1] ^ read_lane(key + 8));
    value ^= value >> 37;
    value *= PRIME_MX1;
    return value ^ value >> 32;
}

/* Write 16 bytes in big-endian order: the high half, then the low half. */
static void
digest_finish(const Digest *digest, uint8_t *result)
{
    uint64_t num_bytes = digest->total * STRIPE;
    uint64_t halves[2] = {merge(digest, HIGH_KEY, ~(num_bytes * PRIME64_2)),
                          merge(digest, LOW_KEY, num_bytes * PRIME64_1)};
    for (int i = 0; i < 16; i++)
        result[i] = (uint8_t)(halves[i / 8] >> (56 - i % 8 * 8));
}

#endif
