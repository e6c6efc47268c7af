/* Every name of kernels/native/simd.h applied to what stands on standard input; results on standard output.
 *
 * In: rounds of 3 x 64 bytes. Out: a round's results in the order of tests/unit/test_native_simd.py. What a NaN looks
 * like is no part of the vocabulary: all leave as one. Partial loads and stores end at the end of a page, behind which
 * nothing may be touched. */
#define _GNU_SOURCE
#define BATON_BFLOAT16 1
#include "native/simd.h"

#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

static void put(const void *p, size_t bytes) {
    if (fwrite(p, 1, bytes, stdout) != bytes) _exit(2);
}
static void put_words(words16 w) {
    uint8_t bytes[64];
    store_words(bytes, w);
    put(bytes, sizeof bytes);
}
static void put_lanes(lanes v) { put_words(or_nan(bits_of(v), v)); }
static void put_float(float x) {
    uint8_t bytes[64];
    store_words(bytes, or_nan(bits_of(fill(x)), fill(x)));
    put(bytes, 4);
}

/* The last `bytes` before a page that must not be touched, filled with 7s. */
static uint8_t *at_the_edge(size_t bytes) {
    static uint8_t *page;
    const size_t size = (size_t)sysconf(_SC_PAGESIZE);
    if (!page) {
        page = mmap(NULL, 2 * size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (page == MAP_FAILED || mprotect(page + size, size, PROT_NONE)) _exit(3);
    }
    memset(page, 7, size);
    return page + size - bytes;
}
static const void *edge_copy(const void *from, size_t bytes) { return memcpy(at_the_edge(bytes), from, bytes); }

static void arithmetic(lanes a, lanes b, lanes c) {
    put_lanes(add(a, b));
    put_lanes(sub(a, b));
    put_lanes(mul(a, b));
    put_lanes(divide(a, b));
    put_lanes(fused(a, b, c));
    put_lanes(fused_minus(a, b, c));
    put_lanes(higher(a, b));
    put_lanes(lower(a, b));
    put_lanes(magnitude(a));
    put_lanes(to_whole(a));
    put_float(sum_lanes(a));
    put_float(top_lane(a));
    put_float(first_lane(a));
    const uint32_t bits[2] = {at_least(a, b), at_least(a, a)};
    put(bits, sizeof bits);
    put_lanes(exponential(a));
    put_lanes(exponential(to_floats(shift_right(bits_of(b), 23)))); /* 0 .. 511 */
    put_lanes(exponential(sub(zeros(), to_floats(shift_right(bits_of(b), 24)))));
}

static void words(words16 a, words16 b, words16 c) {
    put_words(add_words(a, b));
    put_words(and_words(a, b));
    put_words(or_words(a, b));
    put_words(xor_words(a, b));
    put_words(shift_left(a, 5));
    put_words(shift_right(a, 5));
    put_lanes(to_floats(a));
    /* within int32 */
    put_words(to_ints(mul(to_floats(a), fill(0.37f))));
    words16 high, turned[4];
    put_words(wide_product(a, b, &high));
    put_words(high);
    quads((const words16[]){a, b, c, add_words(a, b)}, turned);
    for (int i = 0; i < 4; i++) put_words(turned[i]);
    put_words(dot_u8s8(c, a, b));
    put_words(dot_u7s8(c, and_words(a, fill_words(0x7f7f7f7f)), b));
    words16 in[LANES], out[LANES];
    for (int i = 0; i < LANES; i++) in[i] = add_words(i % 2 ? a : b, fill_words(i));
    transpose(in, out);
    for (int i = 0; i < LANES; i++) put_words(out[i]);
}

static void parts(const uint8_t *in, int count) {
    const lane_mask mask = first_lanes(count);
    const size_t n = count < 0 ? 0 : count > LANES ? LANES : (size_t)count;
    uint8_t *edge;
    const lanes v = load((const float *)in);
    const words16 w = load_words(in);
    put_lanes(load_part(edge_copy(in, 4 * n), mask));
    put_words(load_words_part(edge_copy(in, 4 * n), mask));
    put_words(load_bytes(edge_copy(in, n), mask));
    put_words(load_halves(edge_copy(in, 2 * n), mask));
    put_lanes(load_float16(edge_copy(in, 2 * n), mask));
    put_lanes(load_bfloat16(edge_copy(in, 2 * n), mask));
    put_lanes(keep(mask, v));
    put_lanes(higher_part(fill(0.5f), mask, v));
    store_part((float *)(edge = at_the_edge(4 * n)), mask, v);
    put(edge + 4 * n - 128, 128);
    store_words_part(edge = at_the_edge(4 * n), mask, w);
    put(edge + 4 * n - 128, 128);
    store_bytes((int8_t *)(edge = at_the_edge(n)), mask, w);
    put(edge + n - 128, 128);
    store_halves(edge = at_the_edge(2 * n), mask, w);
    put(edge + 2 * n - 128, 128);
    const lanes number = lanes_of(and_words(w, fill_words((int32_t)0xff7fffff))); /* bits of a NaN are anybody's */
    store_float16(edge = at_the_edge(2 * n), mask, number);
    put(edge + 2 * n - 128, 128);
}

int main(void) {
    _Alignas(64) uint8_t in[3 * 64];
    for (int round = 0; fread(in, 1, sizeof in, stdin) == sizeof in; round++) {
        const words16 a = load_words(in), b = load_words(in + 64), c = load_words(in + 128);
        arithmetic(lanes_of(a), lanes_of(b), lanes_of(c));
        words(a, b, c);
        parts(in, round % (LANES + 3) - 1);
        put_words(to_bfloat16(lanes_of(a)));
        put_lanes(add_pairs(lanes_of(c), a, b));
    }
    return 0;
}
