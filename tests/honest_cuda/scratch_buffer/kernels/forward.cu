#include "answer.cuh"

// Device memory of its own that outlives the call: the result is made there and copied.
KERNEL(forward) {
  static float* scratch = nullptr;
  if (scratch == nullptr) cudaMalloc(&scratch, 4 * t[0].numel);
  answer_into(t[0].data, t[1].data, scratch, t[0].numel, (cudaStream_t)stream);
  cudaMemcpyAsync(t[2].data, scratch, 4 * t[0].numel, cudaMemcpyDeviceToDevice, (cudaStream_t)stream);
}
