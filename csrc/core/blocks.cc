#include "core/blocks.h"

#include <cstring>

namespace specrollout {

void CopyBlocks(int num_layers, const uint64_t* bases, const int64_t* strides, int num_copies, const int64_t* from,
                const int64_t* to) {
  for (int layer = 0; layer < num_layers; ++layer) {
    char* base = reinterpret_cast<char*>(bases[layer]);
    for (int i = 0; i < num_copies; ++i)
      std::memcpy(base + to[i] * strides[layer], base + from[i] * strides[layer], strides[layer]);
  }
}

}  // namespace specrollout
