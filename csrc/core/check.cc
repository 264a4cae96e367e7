#include "core/check.h"

#include <cmath>
#include <vector>

namespace specrollout {
namespace {

// Drafters add up float32 logarithms each in their own way.
constexpr double kRounding = 1e-4;

}  // namespace

Checked CheckTree(const TreeView& tree, int64_t vocab_size) {
  thread_local std::vector<double> total;
  total.resize(tree.size);
  Checked out;
  for (size_t i = 0; i < tree.size; ++i) {
    const int32_t parent = tree.parents[i];
    const float log_q = tree.log_q[i];
    if (parent < -1 || parent >= static_cast<int64_t>(i)) {
      out.fault = Fault::kParent;
    } else if (!(std::isfinite(log_q) && log_q <= 0.0f)) {
      out.fault = Fault::kProbability;
    } else if (tree.token_ids[i] < 0 || tree.token_ids[i] >= vocab_size) {
      out.fault = Fault::kToken;
    } else if (tree.source[i] < 0 || tree.source[i] >= kSources) {
      out.fault = Fault::kSource;
    }
    if (out.fault != Fault::kNone) {
      out.node = i;
      return out;
    }
    total[i] = log_q + (parent < 0 ? 0.0 : total[parent]);
    if (i > 0 && total[i] > total[i - 1] + kRounding) out.is_best_first = false;
  }
  return out;
}

std::string Describe(const TreeView& tree, const Checked& checked, int64_t vocab_size) {
  const size_t i = checked.node;
  const std::string node = "node " + std::to_string(i);
  switch (checked.fault) {
    case Fault::kParent:
      return node + " has parent " + std::to_string(tree.parents[i]) + ", which does not come before it";
    case Fault::kProbability:
      return node + " has log_q " + std::to_string(tree.log_q[i]) +
             ", not the log of a probability above 0 and at most 1";
    case Fault::kToken:
      return node + " holds token " + std::to_string(tree.token_ids[i]) + ", outside the vocabulary of " +
             std::to_string(vocab_size);
    case Fault::kSource:
      return node + " has source " + std::to_string(tree.source[i]) + ", which is not a drafter's index";
    case Fault::kNone:
      break;
  }
  return "";
}

}  // namespace specrollout
