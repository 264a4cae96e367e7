// Where did the last n tokens of an answer occur before: in earlier answers to its problem, its siblings, its prompt?
//
// Twin and specification: tests/reference/history.py. What belongs here: the places of every context,
// kept as the text grows, shrinks and is forgotten. What they are worth is in history_draft.h.
//
// As in LZ matchers: a hash table per context length names the latest place of each context, and every place names the
// one before it. See docs/adr/0008-history-index.md for what else was tried.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/history_text.h"

namespace specrollout {

// One problem's prompts and answers. Not thread-safe: one caller at a time per index.
class HistoryIndex {
 public:
  // The longest `max_match` there is.
  static constexpr int kReach = 64;
  // Contexts are compared at least this far back.
  static constexpr int kCompared = 33;
  static constexpr int kMaxLengths = 3;
  static constexpr int32_t kOne = 1 << 8;

  // Throws std::invalid_argument unless 1 <= min_match <= max_match <= 64 and 1 <= max_matches.
  HistoryIndex(int min_match, int max_match, int max_matches);

  // The prompt of the documents added from now on. One that the index has is not stored again. A prompt goes once all
  // documents that were added behind it are gone, and another one is the present one.
  void SetPrompt(const int32_t* token_ids, size_t count);
  // A finished answer; returns its id. Weight 0 keeps it out of all drafts.
  int32_t Add(const int32_t* token_ids, size_t count, int32_t weight, int32_t epoch);
  // An answer that grows.
  int32_t Open(int32_t epoch, int32_t weight);
  void Append(int32_t id, const int32_t* token_ids, size_t count);
  // Makes the answer hold exactly these tokens: appends what is new, or starts it over where what it holds is no
  // prefix; then returns false. Only its last `kSyncWindow` tokens are compared.
  bool Sync(int32_t id, const int32_t* token_ids, size_t count);
  void SetWeight(int32_t id, int32_t weight);
  void Remove(int32_t id);
  // Removes all answers of epochs before this one; returns how many.
  int Retire(int32_t before_epoch);

  size_t num_tokens() const { return text_.num_tokens(); }
  size_t num_documents() const;
  size_t nbytes() const;
  int max_matches() const { return max_matches_; }
  int min_match() const { return lengths_.front().n; }
  int max_match() const { return lengths_.back().n; }
  int num_lengths() const { return static_cast<int>(lengths_.size()); }
  int length(int which) const { return lengths_[which].n; }
  // how far back contexts are compared
  int reach() const { return std::max(kCompared, max_match()); }
  const HistoryText& text() const { return text_; }

  // Of the `count` tokens before `recent_end`.
  static uint64_t Hash(const int32_t* recent_end, int count);
  // The latest live place whose context of length `which` ends before `recent_end`, 0 = none.
  void PrefetchSlot(int which, uint64_t hash) const;
  void PrefetchHead(int which, uint64_t hash) const;
  Place Latest(int which, uint64_t hash, const int32_t* recent_end) const;
  // The live place before this one with the same context.
  Place Previous(int which, Place place) const;

  // Throws std::logic_error with the reason if a stored invariant is broken.
  void CheckIntegrity() const;

 private:
  static constexpr size_t kSyncWindow = 64;

  struct Head {
    uint32_t tag = 0;
    // latest place, 0 = free
    Place place = 0;
  };
  // All contexts of one length n.
  struct Length {
    int n;
    // open-addressing hash table; a power of two, at most three quarters full
    std::vector<Head> heads;
    size_t num_distinct = 0;
  };

  // A context's mark in its table.
  static uint32_t Tag(uint64_t hash) { return static_cast<uint32_t>(hash >> 24); }
  static bool IsTooFull(size_t used, size_t capacity) { return used * 4 > capacity * 3; }

  void AppendTo(int32_t slot, const int32_t* token_ids, size_t count);
  // Appends one token, before which `known` tokens stand that end at `recent_end`.
  void AppendOne(int32_t slot, int32_t token, const int32_t* recent_end, int known);
  void Link(int which, Place place, const int32_t* recent_end, uint64_t hash);
  // The head of the context, or the free one where it belongs.
  size_t FindHead(const Length& length, uint32_t tag, const int32_t* recent_end) const;
  void Resize(Length* length, size_t capacity);
  Place SkipDead(int which, Place place) const;
  void Kill(int32_t slot, bool is_kept);
  // A document behind the prompt whose last page this is (0 = none) is gone, or it is no longer the present one.
  void LeavePrompt(int32_t last, int32_t num_gone);
  void CompactIfHalfDead();
  void Compact();
  void CheckLength(int which) const;

  int max_matches_;
  // [1 to kMaxLengths] shortest first
  std::vector<Length> lengths_;
  HistoryText text_;
  // last page of the present prompt, 0 = none; and every prompt's slot
  int32_t prompt_ = 0;
  std::vector<int32_t> prompts_;
};

}  // namespace specrollout
