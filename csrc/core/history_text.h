// The text of one problem: prompts and answers, as documents in pages of 64 tokens.
//
// What belongs here: where a token is, what comes before and after it, and whose it is. Not: finding anything.
//
// Pages let several answers grow at the same time, keep what a place needs close together, and go back to the
// allocator one by one. Beside its tokens a page has room for one number per token and context length, in which the
// index chains places (history_index.h).

#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace specrollout {

// A token's address: page * 64 + offset within the page. 0 is no place.
using Place = int32_t;

class HistoryText {
 public:
  static constexpr int kPageBits = 6;
  static constexpr int kPageSize = 1 << kPageBits;

  struct Page {
    // [64] tokens, then [64] numbers per context length; null while the page is unused
    int32_t* cells = nullptr;
    // whose it is: index into the documents
    int32_t slot = -1;
    // the page of the tokens before (of a first page: the prompt's last one, which is full), 0 = none
    int32_t before = 0;
    int32_t after = 0;
    // the offsets in use; only a prompt begins late, since it ends where a page ends
    uint8_t begin = 0;
    uint8_t end = 0;
  };

  struct Document {
    int32_t id = -1;
    int32_t epoch = 0;
    // fixed-point, see tests/reference/history.py
    int32_t weight = 0;
    int32_t first = 0;
    int32_t last = 0;
    int32_t size = 0;
    // last page of its prompt, 0 = none
    int32_t prompt = 0;
    bool is_prompt = false;
    // of a prompt: live documents that begin behind it
    int32_t num_answers = 0;
    // removed, but its pages are still chained
    bool is_dead = false;
  };

  explicit HistoryText(int numbers_per_token) : numbers_(numbers_per_token), pages_(1) {}
  ~HistoryText();
  HistoryText(const HistoryText&) = delete;
  HistoryText& operator=(const HistoryText&) = delete;

  // Both return the slot. A prompt of `size` tokens is laid such that it ends with its page.
  int32_t AddDocument(int32_t epoch, int32_t weight, int32_t prompt);
  int32_t AddPrompt(int32_t size);
  // Throws std::invalid_argument for an id that was never given out or has been removed.
  int32_t SlotOf(int32_t id) const;

  // Throws std::length_error when the text is full (2^31 tokens).
  Place Append(int32_t slot, int32_t token);
  // Declares the document dead. With `is_kept` its id lives on with an empty text.
  void Kill(int32_t slot, bool is_kept);
  // Frees the pages of dead documents. The caller has unchained them.
  void FreeDead();

  // Copies the last tokens before the document's end to just before `end`: `count`, or as many as there are.
  int Recent(int32_t slot, int count, int32_t* end) const;
  // How many tokens before the place equal those before `recent_end`, at most `limit`.
  int SharedContext(Place place, const int32_t* recent_end, int limit) const;
  // Whether the document's last `count` tokens are these.
  bool EndsIn(int32_t slot, const int32_t* token_ids, int32_t count) const;

  const Page& PageAt(Place place) const { return pages_[place >> kPageBits]; }
  Document& DocumentAt(int32_t slot) { return documents_[slot]; }
  const Document& DocumentAt(int32_t slot) const { return documents_[slot]; }
  const Document& Owner(Place place) const { return documents_[PageAt(place).slot]; }
  bool IsDead(Place place) const { return Owner(place).is_dead; }
  int32_t& Number(Place place, int which) const {
    return PageAt(place).cells[kPageSize * (1 + which) + (place & (kPageSize - 1))];
  }

  const std::vector<Page>& pages() const { return pages_; }
  const std::vector<Document>& documents() const { return documents_; }
  // Live tokens, prompts included; and tokens whose memory is not given back yet.
  size_t num_tokens() const { return num_tokens_; }
  size_t num_dead() const { return num_dead_; }
  size_t nbytes() const;

 private:
  int32_t AddPage(int32_t slot, int32_t before, int begin);
  int32_t AddSlot(const Document& document);

  int numbers_;
  // page 0 is never used, so that place 0 is none
  std::vector<Page> pages_;
  std::vector<int32_t> free_pages_;
  std::vector<Document> documents_;
  std::vector<int32_t> free_slots_;
  std::unordered_map<int32_t, int32_t> slot_of_id_;
  int32_t next_id_ = 0;
  size_t num_tokens_ = 0;
  size_t num_dead_ = 0;
  size_t num_used_pages_ = 0;
};

}  // namespace specrollout
