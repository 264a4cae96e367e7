// The n-gram index on a small random text, without Python: meant to be built with the sanitizers on.

#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "core/ngram_index.h"

namespace {

int failures = 0;

void Expect(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "failed: %s\n", what);
  ++failures;
}

void TestALoopIsContinued() {
  specrollout::NgramIndex index(2, 4, 8);
  const std::vector<int32_t> text{1, 2, 3, 1, 2, 3, 1, 2};
  index.Append(text.data(), text.size());
  specrollout::Trie trie;
  specrollout::Draft draft;
  index.Propose(3, 3, true, &trie, &draft);
  Expect(draft.token_ids == std::vector<int32_t>{3, 1, 2}, "a loop is continued");
  Expect(draft.parents == std::vector<int32_t>{-1, 0, 1}, "a chain hangs together");
}

void TestInvariantsHoldOnRandomText() {
  std::mt19937 random(3);
  specrollout::NgramIndex index(1, 6, 5);
  specrollout::Trie trie;
  specrollout::Draft draft;
  for (int step = 0; step < 300; ++step) {
    std::vector<int32_t> chunk(random() % 9);
    for (int32_t& token : chunk) token = static_cast<int32_t>(random() % (1 + step / 10));
    index.Append(chunk.data(), chunk.size());
    index.CheckIntegrity();
    index.Propose(static_cast<int>(random() % 65), static_cast<int>(random() % 17), step % 2, &trie, &draft);
    Expect(draft.token_ids.size() == draft.parents.size(), "one parent per token");
    for (size_t node = 0; node < draft.parents.size(); ++node) {
      Expect(draft.parents[node] < static_cast<int32_t>(node), "parents come before children");
      Expect(draft.log_q[node] <= 0.0f, "probabilities are at most 1");
    }
  }
}

void TestAChangedTextStartsOver() {
  specrollout::NgramIndex index(1, 2, 4);
  const std::vector<int32_t> first{5, 6, 5};
  const std::vector<int32_t> second{5, 7};
  Expect(index.Sync(first.data(), first.size()), "an empty index is a prefix of any text");
  Expect(!index.Sync(second.data(), second.size()), "a changed text starts over");
  Expect(index.size() == 2, "only the new text is held");
  index.CheckIntegrity();
}

}  // namespace

int main() {
  TestALoopIsContinued();
  TestInvariantsHoldOnRandomText();
  TestAChangedTextStartsOver();
  return failures == 0 ? 0 : 1;
}
