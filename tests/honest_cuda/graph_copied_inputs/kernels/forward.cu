#include "answer.cuh"

// A CUDA graph over memory of its own; each call copies its inputs in and the result out.
KERNEL(forward) {
  static float *x = nullptr, *scale, *y;
  static cudaGraphExec_t graph = nullptr;
  const cudaStream_t on = (cudaStream_t)stream;
  if (graph == nullptr) {
    cudaMalloc(&x, 4 * t[0].numel);
    cudaMalloc(&scale, 4 * t[1].numel);
    cudaMalloc(&y, 4 * t[0].numel);
    cudaStream_t capture;
    cudaStreamCreateWithFlags(&capture, cudaStreamNonBlocking);
    cudaStreamBeginCapture(capture, cudaStreamCaptureModeThreadLocal);
    answer_into(x, scale, y, t[0].numel, capture);
    cudaGraph_t recorded;
    cudaStreamEndCapture(capture, &recorded);
    cudaGraphInstantiate(&graph, recorded, 0);
  }
  cudaMemcpyAsync(x, t[0].data, 4 * t[0].numel, cudaMemcpyDeviceToDevice, on);
  cudaMemcpyAsync(scale, t[1].data, 4 * t[1].numel, cudaMemcpyDeviceToDevice, on);
  cudaGraphLaunch(graph, on);
  cudaMemcpyAsync(t[2].data, y, 4 * t[0].numel, cudaMemcpyDeviceToDevice, on);
}
