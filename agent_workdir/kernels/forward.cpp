#ifndef __NVCC__  // the kernel of a CPU; on a GPU it is forward.cu
#include "binding_registry.h"
#include "vec.h"

// out = alpha * sigmoid(a) + b in one pass.
KERNEL(forward) {
  const float* a = f32(t[0]);
  const float* b = f32(t[1]);
  const float alpha = f32(t[2])[0];
  float* out = f32(t[3]);
#pragma omp simd
  for (int64_t i = 0; i < t[3].numel; ++i) {
    out[i] = alpha * vsigmoid(a[i]) + b[i];
  }
}
#endif
