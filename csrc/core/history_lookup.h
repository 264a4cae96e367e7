// One step's drafts of many requests.
//
// What belongs here: walking the chains of all requests at once. A chain is a list in memory that no cache holds, so
// each of its steps waits for memory; the steps of many requests wait together.

#pragma once

#include <cstdint>
#include <vector>

#include "core/history_draft.h"
#include "core/history_index.h"

namespace specrollout {

struct Ask {
  const HistoryIndex* index;
  // id of the asker's own answer
  int32_t document;
  int32_t max_nodes;
  int32_t max_depth;
  bool is_chain;
  Ends ends = {};
};

// Working memory of a step; reused.
class HistoryLookup {
 public:
  // Fills `all` with the drafts one after the other, and `node_start` [asks + 1] with where each begins.
  void Propose(const std::vector<Ask>& asks, bool siblings, Draft* all, std::vector<int32_t>* node_start);

 private:
  static constexpr int kAtOnce = 16;
  // found so many places, shorter contexts are not asked
  static constexpr int kEnough = 8;

  // One request's way through the chains, from the longest context to the shortest.
  struct Walk {
    const HistoryIndex* index;
    int32_t slot;
    int32_t epoch;
    int32_t known;
    // the last `known` tokens, right-aligned
    int32_t recent[HistoryIndex::kReach];
    const int32_t* recent_end() const { return recent + HistoryIndex::kReach; }
    uint64_t hashes[HistoryIndex::kMaxLengths];
    // present chain, its next place, places looked at on it
    int which;
    Place place;
    int32_t seen;
    std::vector<Candidate> found;
  };

  void Begin(const Ask& ask, Walk* walk);
  // Moves to the next shorter context's chain; false when there is none.
  bool NextChain(Walk* walk);
  // Judges the present place and moves on; false when the walk is over.
  bool Step(Walk* walk, bool siblings);

  Walk walks_[kAtOnce];
  Drafting drafting_;
  Draft draft_;
};

}  // namespace specrollout
