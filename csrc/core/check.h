// Whether a draft tree is one: what every reader of a tree relies on, looked at once, where drafters hand trees over.
//
// Twin and specification: vllm_specrollout/trees/build.py, `check`.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/unite.h"

namespace specrollout {

// Drafters that are told apart: a node's source is below it.
constexpr int kSources = 16;
// A vocabulary that holds every token id.
constexpr int64_t kAnyToken = int64_t{1} << 31;

enum class Fault { kNone, kParent, kProbability, kToken, kSource };

struct Checked {
  Fault fault = Fault::kNone;
  // where it was found
  size_t node = 0;
  // every prefix is the best tree of its size, but for rounding
  bool is_best_first = true;
};

Checked CheckTree(const TreeView& tree, int64_t vocab_size);

// What is wrong, in words for a log.
std::string Describe(const TreeView& tree, const Checked& checked, int64_t vocab_size);

}  // namespace specrollout
