#include "answer.cuh"

// Two halves on two streams, forked and joined by events, as PyTorch's wait_stream does.
KERNEL(forward) {
  static cudaStream_t side = nullptr;
  static cudaEvent_t forked, joined;
  if (side == nullptr) {
    cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking);
    cudaEventCreateWithFlags(&forked, cudaEventDisableTiming);
    cudaEventCreateWithFlags(&joined, cudaEventDisableTiming);
  }
  const int64_t half = t[0].numel / 2;
  cudaEventRecord(forked, (cudaStream_t)stream);
  cudaStreamWaitEvent(side, forked, 0);
  answer_into(f32(t[0]) + half, t[1].data, f32(t[2]) + half, half, side);
  answer_into(t[0].data, t[1].data, t[2].data, half, (cudaStream_t)stream);
  cudaEventRecord(joined, side);
  cudaStreamWaitEvent((cudaStream_t)stream, joined, 0);
}
