#include "answer.cuh"

KERNEL(forward) { answer(t, stream); }
