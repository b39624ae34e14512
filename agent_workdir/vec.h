// Branch-free float functions that vectorise inside `#pragma omp simd` (cpu) and map to CUDA's own on a GPU.
// libm's expf, tanhf, erff, logf are calls that stop vectorisation: 10 to 49 times slower in a loop (AVX-512).
// Polynomials were fitted for this file to the smallest largest relative error; every function is within 4 ulp of the exact
// value (tests/integration/test_vec.py), but a result below 2^-125 is 0, and vlog takes no denormal numbers.
#pragma once
#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define VEC_FN static __device__ __forceinline__ float
VEC_FN vexp(float x) { return expf(x); }
VEC_FN vlog(float x) { return logf(x); }
VEC_FN vlog1p(float x) { return log1pf(x); }
VEC_FN vtanh(float x) { return tanhf(x); }
VEC_FN verf(float x) { return erff(x); }
VEC_FN vsigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
VEC_FN vsqrt(float x) { return sqrtf(x); }
VEC_FN vabs(float x) { return fabsf(x); }
VEC_FN vmax(float a, float b) { return fmaxf(a, b); }
VEC_FN vmin(float a, float b) { return fminf(a, b); }
// Combine the values v of all threads of a block and return the result to each of them. Every thread must call them, and a block
// has one dimension of 32, 64, 128, 256, 512 or 1,024 threads.
#define VEC_BLOCK(name, combined)                                  \
  VEC_FN name(float v) {                                           \
    __shared__ float part[32];                                     \
    for (unsigned k = 16; k > 0; k /= 2) {                         \
      const float w = __shfl_xor_sync(0xffffffff, v, k);           \
      v = combined;                                                \
    }                                                              \
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;         \
    __syncthreads();                                               \
    v = part[threadIdx.x % (blockDim.x / 32)];                     \
    for (unsigned k = blockDim.x / 64; k > 0; k /= 2) {            \
      const float w = __shfl_xor_sync(0xffffffff, v, k);           \
      v = combined;                                                \
    }                                                              \
    __syncthreads();                                               \
    return v;                                                      \
  }
VEC_BLOCK(vblock_sum, v + w)
VEC_BLOCK(vblock_prod, v * w)
VEC_BLOCK(vblock_max, fmaxf(v, w))
VEC_BLOCK(vblock_min, fminf(v, w))
#undef VEC_BLOCK
#else
#define VEC_FN static inline __attribute__((always_inline)) float
static inline __attribute__((always_inline)) float vec_float(int32_t bits) { return __builtin_bit_cast(float, bits); }
static inline __attribute__((always_inline)) int32_t vec_bits(float x) { return __builtin_bit_cast(int32_t, x); }

VEC_FN vabs(float x) { return __builtin_fabsf(x); }
VEC_FN vmax(float a, float b) { return a > b ? a : b; }
VEC_FN vmin(float a, float b) { return a < b ? a : b; }
VEC_FN vsqrt(float x) { return __builtin_sqrtf(x); }

// (e^r - 1) / r for r from -log(2) / 2 to log(2) / 2.
VEC_FN vec_expm1_near_zero(float r) {
  float q = 1.38825163e-3f;
  q = q * r + 8.36654714e-3f;
  q = q * r + 4.16672007e-2f;
  q = q * r + 1.66665434e-1f;
  q = q * r + 0.499999981f;
  return q * r + 1.0f;
}

// x from -low to high, both positive. As integers, since a float's clamp becomes four comparisons and three blends; a NaN is lost.
VEC_FN vec_clamp(float x, float low, float high) {
  const uint32_t u = (uint32_t)vec_bits(x), l = (uint32_t)vec_bits(-low);
  const int32_t s = (int32_t)(u < l ? u : l), h = vec_bits(high);
  return vec_float(s < h ? s : h);
}

VEC_FN vexp(float x) {
  const float c = vec_clamp(x, 87.6f, 89.0f);
  // Adding 1.5 * 2^23 leaves the nearest integer n in the low bits; 126 more, and a shift makes them 2^(n-1).
  const float t = c * 1.44269504f + 12583038.0f, n = t - 12583038.0f;
  const float r = (c - n * 0.693359375f) + n * 2.12194440e-4f;
  const float p = vec_expm1_near_zero(r) * r + 1.0f;
  const float y = (p + p) * vec_float((int32_t)((uint32_t)vec_bits(t) << 23));
  return x == x ? y : x;
}

// e^x - 1 for x from -87 to 20; one constant for log(2) is enough, since its part grows with n as what it is added to does.
VEC_FN vec_expm1(float x) {
  const float t = x * 1.44269504f + 12583039.0f, n = t - 12583039.0f;
  const float r = x - n * 0.693147182f;
  const float s = vec_float((int32_t)((uint32_t)vec_bits(t) << 23));
  return (s * r) * vec_expm1_near_zero(r) + (s - 1.0f);
}

// log(1 + f) for 1 + f from sqrt(1/2) to sqrt(2).
VEC_FN vec_log_near_one(float f) {
  float p = -7.866668e-2f;
  p = p * f + 1.2821749e-1f;
  p = p * f - 1.3101634e-1f;
  p = p * f + 1.41890004e-1f;
  p = p * f - 1.66275993e-1f;
  p = p * f + 2.00019687e-1f;
  p = p * f - 2.50007719e-1f;
  p = p * f + 3.33333224e-1f;
  p = p * f - 4.9999997e-1f;
  return p * f * f + f;
}

VEC_FN vlog(float x) {
  const int32_t b = vec_bits(x) - 0x3f3504f3;  // sqrt(1/2)
  const float y = vec_log_near_one(vec_float((b & 0x007fffff) + 0x3f3504f3) - 1.0f) + (float)(b >> 23) * 0.693147181f;
  return x > 0.0f ? (x < __builtin_inff() ? y : x) : (x == 0.0f ? -__builtin_inff() : __builtin_nanf(""));
}

VEC_FN vlog1p(float x) {
  // 1 + x is 2^k (1 + f); f is had from x itself, since 1 + x has lost some of its bits.
  const int32_t k = (vec_bits(1.0f + x) - 0x3f3504f3) & (int32_t)0xff800000;
  const float f = vec_float(vec_bits(x) - k) + (0.25f * vec_float(0x40800000 - k) - 1.0f);
  const float y = vec_log_near_one(f) + (float)k * (0.693147181f / 8388608.0f);
  const float z = x > -1.0f ? y : (x == -1.0f ? -__builtin_inff() : __builtin_nanf(""));
  return x < __builtin_inff() ? z : x;
}

VEC_FN vsigmoid(float x) { return 1.0f / (1.0f + vexp(-x)); }

VEC_FN vtanh(float x) {
  const float e = vec_expm1(vec_clamp(x + x, 20.0f, 20.0f)), y = e / (e + 2.0f);
  return x == x ? y : x;
}

VEC_FN verf(float x) {
  const float a = vmin(3.95f, vabs(x));
  float p = -9.25627075e-6f;  // -log(erfc(a)) / a
  p = p * a + 1.17641319e-4f;
  p = p * a - 6.32837018e-4f;
  p = p * a + 1.66702774e-3f;
  p = p * a - 1.60396337e-4f;
  p = p * a - 1.91530638e-2f;
  p = p * a + 1.0277783e-1f;
  p = p * a + 6.36619382e-1f;
  p = p * a + 1.12837917f;
  return __builtin_copysignf(vec_expm1(-a * p), x);
}
#endif

// Elements of half-precision tensors: read as float, and rounded to nearest, ties to even, when a float is stored.
//   const bf16* x = (const bf16*)t[0].data; float v = x[i]; … out[i] = v;
#ifdef __CUDACC__
#define HALF_FN __device__ __forceinline__
struct f16 {
  uint16_t bits;
  f16() = default;
  HALF_FN f16(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  HALF_FN operator float() const {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
  }
};
HALF_FN uint32_t half_bits(float x) { return __float_as_uint(x); }
HALF_FN float half_float(uint32_t bits) { return __uint_as_float(bits); }
#else
#define HALF_FN inline __attribute__((always_inline))
static HALF_FN uint32_t half_bits(float x) { return (uint32_t)vec_bits(x); }
static HALF_FN float half_float(uint32_t bits) { return vec_float((int32_t)bits); }
struct f16 {
  uint16_t bits;
  f16() = default;
  HALF_FN f16(float x) { *this = x; }
  HALF_FN void operator=(float x) {  // not through a temporary, which would stop vectorisation
    const uint32_t b = half_bits(x), twice = b + b, exponent = twice & 0xff000000;
    // The sum with a power of two that is 2^13 units of the float16 rounds to one of them; the factors overflow first.
    const uint32_t base = ((exponent < 0x71000000 ? 0x71000000 : exponent) >> 1) + 0x07800000;
    const uint32_t r = half_bits(half_float(base) + vabs(x) * 0x1p112f * 0x1p-110f);
    const uint32_t rounded = ((r >> 13) & 0x7c00) + (r & 0x0fff);
    bits = (uint16_t)(((b >> 16) & 0x8000) | (twice > 0xff000000 ? 0x7e00 : rounded));
  }
  HALF_FN operator float() const {
    const uint32_t h = bits, magnitude = (h & 0x7fff) << 13;
    const uint32_t b = half_bits(half_float(magnitude) * 0x1p112f);
    return half_float(((h & 0x8000) << 16) | (magnitude >= 0x0f800000 ? b | 0x7f800000 : b));
  }
};
#endif
struct bf16 {
  uint16_t bits;
  bf16() = default;
  HALF_FN bf16(float x) { *this = x; }
  HALF_FN void operator=(float x) {
    const uint32_t b = half_bits(x);
    bits = (uint16_t)(x == x ? (b + 0x7fff + ((b >> 16) & 1)) >> 16 : 0x7fc0);
  }
  HALF_FN operator float() const { return half_float((uint32_t)bits << 16); }
};
#undef HALF_FN
#undef VEC_FN
