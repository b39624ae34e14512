#include "gemv.cuh"

KERNEL(forward) { gemv(t, stream); }
