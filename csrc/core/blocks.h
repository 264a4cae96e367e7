// Whole KV cache blocks, copied in every layer: no knowledge of a block's inner layout is needed.
#pragma once

#include <cstdint>

namespace specrollout {

// bases: [layers] address of block 0; strides: [layers] bytes from one block to the next (the block's own size).
// Copies are made in order; a target must not be the source of a later copy.
void CopyBlocks(int num_layers, const uint64_t* bases, const int64_t* strides, int num_copies, const int64_t* from,
                const int64_t* to);

}  // namespace specrollout
