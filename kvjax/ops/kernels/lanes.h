/* Vectors of eight numbers on every processor, so that only the rounding of fused operations depends on the processor. */
#pragma once
#include <stdint.h>

#pragma GCC diagnostic ignored "-Wpsabi" /* vectors are only passed between inlined functions */

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#elif defined(__x86_64__) && defined(__GLIBC__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif
#define INLINED static inline __attribute__((always_inline))

#define LANES 8
typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#define NEGATIVE -1e30f /* as in kernels/__init__.py */

INLINED Lanes larger(Lanes a, Lanes b) {
    Integers b_is = a < b;
    return (Lanes)((b_is & (Integers)b) | (~b_is & (Integers)a));
}

/* Returns exp(x) for x from -87 to 0, and exp(-87) below, within 2 units in the last place (the polynomial of Cephes'
 * expf). */
INLINED Lanes exponentials(Lanes x) {
    x = larger(x, (Lanes){-87, -87, -87, -87, -87, -87, -87, -87});
    Lanes whole = (x * 1.44269504f + 12582912.0f) - 12582912.0f; /* rounds: at this magnitude f32 has no bits for fractions */
    Lanes rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    Lanes sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    return sum * (Lanes)((__builtin_convertvector(whole, Integers) + 127) << 23);
}
