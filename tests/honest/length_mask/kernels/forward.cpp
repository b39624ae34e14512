#include <cstring>
#include "binding_registry.h"
KERNEL(forward) {
  for (int64_t r = 0; r < 512; ++r) {
    char* row = (char*)t[1].data + r * 16384;
    const int64_t n = ((const int64_t*)t[0].data)[r];
    std::memset(row, 1, n);
    std::memset(row + n, 0, 16384 - n);
  }
}
