// A request's end tokens. Whichever of them it samples is its last one, so nothing is drafted with them: what ends an
// answer comes out of the row before it, and nothing comes behind it.

#pragma once

#include <algorithm>
#include <cstdint>

namespace specrollout {

struct Ends {
  // [count], ascending: a client may name thousands of them
  const int32_t* ids = nullptr;
  int32_t count = 0;

  bool Has(int32_t token) const { return std::binary_search(ids, ids + count, token); }
};

}  // namespace specrollout
