#include "repeat.cuh"

KERNEL(forward) { repeat(t, 64, stream); }
