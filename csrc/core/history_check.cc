// Whether a history index holds what it says: for tests, which ask after every change.
//
// What belongs here: invariants of the text, the tables and the chains. Everything is read, nothing is changed.

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>

#include "core/history_index.h"

namespace specrollout {
namespace {

void Require(bool condition, const std::string& reason) {
  if (!condition) throw std::logic_error("history index: " + reason);
}

}  // namespace

void HistoryIndex::CheckIntegrity() const {
  size_t live = 0;
  for (size_t index = 1; index < text_.pages().size(); ++index) {
    const HistoryText::Page& page = text_.pages()[index];
    if (page.cells == nullptr) continue;
    Require(page.slot >= 0 && static_cast<size_t>(page.slot) < text_.documents().size(), "a page has a document");
    Require(page.begin <= page.end && page.end <= HistoryText::kPageSize, "a page's offsets are in order");
    Require(page.after == 0 || page.end == HistoryText::kPageSize, "only a last page has room");
    if (!text_.documents()[page.slot].is_dead) live += page.end - page.begin;
  }
  Require(live == text_.num_tokens(), "num_tokens counts the live tokens");
  for (int which = 0; which < num_lengths(); ++which) CheckLength(which);
}

void HistoryIndex::CheckLength(int which) const {
  const Length& length = lengths_[which];
  const std::string name = " (n = " + std::to_string(length.n) + ")";
  Require((length.heads.size() & (length.heads.size() - 1)) == 0, "the table is a power of two" + name);
  Require(!IsTooFull(length.num_distinct, length.heads.size()), "the table has room" + name);
  std::array<int32_t, kReach> recent;
  std::array<int32_t, kReach> wanted;
  // copies the place's context to just before `end`
  const auto context = [&](Place place, int32_t* end) {
    int32_t index = place >> HistoryText::kPageBits;
    int offset = place & (HistoryText::kPageSize - 1);
    int found = 0;
    while (index != 0 && found < length.n) {
      const HistoryText::Page& page = text_.pages()[index];
      while (offset > page.begin && found < length.n) *--end = page.cells[--offset], ++found;
      index = page.before;
      offset = HistoryText::kPageSize;
    }
    return found;
  };
  size_t heads = 0;
  size_t reached = 0;
  for (size_t slot = 0; slot < length.heads.size(); ++slot) {
    Place place = length.heads[slot].place;
    if (place == 0) continue;
    ++heads;
    Require(context(place, wanted.data() + length.n) == length.n, "a chained place has a whole context" + name);
    Require(FindHead(length, length.heads[slot].tag, wanted.data() + length.n) == slot,
            "a head is found where it is" + name);
    Require(Tag(Hash(wanted.data() + length.n, length.n)) == length.heads[slot].tag,
            "a head's tag is its context's" + name);
    for (; place != 0; place = text_.Number(place, which), ++reached) {
      Require(text_.PageAt(place).cells != nullptr, "a chained place has a page" + name);
      Require(context(place, recent.data() + length.n) == length.n &&
                  std::equal(recent.data(), recent.data() + length.n, wanted.data()),
              "chained places have the same context" + name);
    }
  }
  Require(heads == length.num_distinct, "num_distinct counts the heads" + name);
  size_t expected = 0;
  for (size_t index = 1; index < text_.pages().size(); ++index) {
    const HistoryText::Page& page = text_.pages()[index];
    if (page.cells == nullptr) continue;
    const Place first = static_cast<Place>(index) << HistoryText::kPageBits;
    for (Place at = first + page.begin; at < first + page.end; ++at)
      expected += context(at, recent.data() + length.n) == length.n;
  }
  Require(reached == expected, "every place is on one chain" + name);
}

}  // namespace specrollout
