// Branch-free float functions that vectorise inside `#pragma omp simd` (cpu) and map to CUDA's own on a GPU.
// libm's expf, tanhf, erff, logf are calls that stop vectorisation: 2 to 25 times slower in a loop.
// Polynomials were fitted at Chebyshev nodes for this file; every function is within a few ulp of the exact value.
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
#else
#define VEC_FN static inline __attribute__((always_inline)) float
static inline __attribute__((always_inline)) float vec_float(int32_t bits) { return __builtin_bit_cast(float, bits); }
static inline __attribute__((always_inline)) int32_t vec_bits(float x) { return __builtin_bit_cast(int32_t, x); }

VEC_FN vabs(float x) { return __builtin_fabsf(x); }
VEC_FN vmax(float a, float b) { return a > b ? a : b; }
VEC_FN vmin(float a, float b) { return a < b ? a : b; }
VEC_FN vsqrt(float x) { return __builtin_sqrtf(x); }

VEC_FN vexp(float x) {
  const float c = vmin(vmax(x, -87.33654f), 88.72283f);
  // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer; floorf would stop vectorisation.
  const float n = (c * 1.44269504f + 12582912.0f) - 12582912.0f;
  const float r = (c - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.3933651e-3f;
  p = p * r + 8.36318e-3f;
  p = p * r + 4.1666467e-2f;
  p = p * r + 1.6666576e-1f;
  p = p * r + 0.5f;
  p = p * r * r + r + 1.0f;
  // Two factors, since 2^128 is no float although e^88.7 is.
  const int32_t k = (int32_t)n, h = k >> 1;
  const float y = p * vec_float((h + 127) << 23) * vec_float((k - h + 127) << 23);
  const float z = x > 88.72283f ? __builtin_inff() : (x < -87.33654f ? 0.0f : y);
  return x == x ? z : x;
}

VEC_FN vlog(float x) {
  const int32_t b = vec_bits(x) - 0x3f3504f3;  // sqrt(1/2): the mantissa falls into [sqrt(1/2), sqrt(2))
  const float e = (float)(b >> 23);
  const float f = vec_float((b & 0x007fffff) + 0x3f3504f3) - 1.0f;
  float p = -7.866668e-2f;
  p = p * f + 1.2821749e-1f;
  p = p * f - 1.3101634e-1f;
  p = p * f + 1.41890004e-1f;
  p = p * f - 1.66275993e-1f;
  p = p * f + 2.00019687e-1f;
  p = p * f - 2.50007719e-1f;
  p = p * f + 3.33333224e-1f;
  p = p * f - 4.9999997e-1f;
  const float y = (p * f * f - e * 2.12194440e-4f) + f + e * 0.693359375f;
  return x > 0.0f ? (x < __builtin_inff() ? y : x) : (x == 0.0f ? -__builtin_inff() : __builtin_nanf(""));
}

VEC_FN vlog1p(float x) {
  const float u = 1.0f + x, d = u - 1.0f;
  const float y = vlog(u) * (x / (d == 0.0f ? 1.0f : d));
  return d == 0.0f ? x : (u < __builtin_inff() ? y : u);
}

VEC_FN vsigmoid(float x) { return 1.0f / (1.0f + vexp(-x)); }

VEC_FN vtanh(float x) {
  const float a = vabs(x), z = x * x;
  float p = -5.664775e-3f;
  p = p * z + 2.059568e-2f;
  p = p * z - 5.372268e-2f;
  p = p * z + 1.3331150e-1f;
  p = p * z - 3.3333263e-1f;
  const float small = x + x * z * p;
  const float large = 1.0f - 2.0f / (vexp(2.0f * a) + 1.0f);
  return a < 0.625f ? small : (x < 0.0f ? -large : large);
}

VEC_FN verf(float x) {
  const float a = vabs(x), z = x * x;
  float p = 7.8824974e-5f;
  p = p * z - 8.0188555e-4f;
  p = p * z + 5.1893122e-3f;
  p = p * z - 2.6854329e-2f;
  p = p * z + 1.12835974e-1f;
  p = p * z - 3.7612626e-1f;
  p = p * z + 1.12837911f;
  const float t = 1.0f / vmin(vmax(a, 1.0f), 4.0f);
  float q = -7.1066186e-3f;
  q = q * t + 1.6843013e-2f;
  q = q * t + 4.8705414e-2f;
  q = q * t - 2.7146092e-1f;
  q = q * t + 5.1817471e-1f;
  q = q * t - 4.8105913e-1f;
  q = q * t + 4.451758e-2f;
  q = q * t + 5.586769e-1f;
  q = q * t + 2.9262615e-4f;
  const float large = 1.0f - vexp(-vmin(z, 80.0f)) * q;
  const float y = a < 1.0f ? x * p : (x < 0.0f ? -large : large);
  return x == x ? y : x;
}
#endif
#undef VEC_FN
