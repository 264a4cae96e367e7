// The history index on small random texts, without Python: meant to be built with the sanitizers on.

#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "core/history_index.h"
#include "core/history_lookup.h"

namespace {

int failures = 0;

void Expect(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "failed: %s\n", what);
  ++failures;
}

std::vector<int32_t> Text(std::mt19937* random, size_t most, int words) {
  std::vector<int32_t> text((*random)() % most);
  for (int32_t& token : text) token = static_cast<int32_t>((*random)() % words);
  return text;
}

void TestAnEarlierAnswerIsContinued() {
  specrollout::HistoryIndex index(2, 4, 8);
  const std::vector<int32_t> prompt{1, 2};
  const std::vector<int32_t> answer{3, 4, 5};
  index.SetPrompt(prompt.data(), prompt.size());
  index.Add(answer.data(), answer.size(), 256, 0);
  const int32_t mine = index.Open(1, 256);
  specrollout::HistoryLookup lookup;
  specrollout::Draft draft;
  std::vector<int32_t> node_start;
  lookup.Propose({{&index, mine, 3, 3, true}}, true, &draft, &node_start);
  Expect(draft.token_ids == answer, "an earlier answer is continued from the prompt");
  Expect(draft.parents == std::vector<int32_t>{-1, 0, 1}, "a chain hangs together");
}

void TestInvariantsHoldWhileAnswersComeAndGo() {
  std::mt19937 random(3);
  specrollout::HistoryIndex index(1, 6, 5);
  specrollout::HistoryLookup lookup;
  specrollout::Draft draft;
  std::vector<int32_t> node_start;
  std::vector<int32_t> docs;
  for (int step = 0; step < 400; ++step) {
    const std::vector<int32_t> text = Text(&random, 150, 1 + step / 10);
    const int what = static_cast<int>(random() % 8);
    if (docs.empty() || what == 0) {
      docs.push_back(index.Add(text.data(), text.size(), 256, step / 50));
    } else if (what == 1) {
      index.SetPrompt(text.data(), text.size());
    } else if (what == 2) {
      index.Sync(docs[random() % docs.size()], text.data(), text.size());
    } else if (what == 3 && docs.size() > 4) {
      index.Remove(docs.front());
      docs.erase(docs.begin());
    } else {
      index.Append(docs[random() % docs.size()], text.data(), text.size() / 8);
    }
    index.CheckIntegrity();
    std::vector<specrollout::Ask> asks;
    for (const int32_t doc : docs) asks.push_back({&index, doc, 20, 7, step % 3 == 0});
    lookup.Propose(asks, step % 2, &draft, &node_start);
    Expect(node_start.size() == asks.size() + 1, "one draft per ask");
    for (size_t ask = 0; ask < asks.size(); ++ask) {
      for (int32_t node = node_start[ask]; node < node_start[ask + 1]; ++node) {
        Expect(draft.parents[node] < node - node_start[ask], "parents come before children");
        Expect(draft.log_q[node] <= 0.0f, "probabilities are at most 1");
      }
    }
  }
}

}  // namespace

int main() {
  TestAnEarlierAnswerIsContinued();
  TestInvariantsHoldWhileAnswersComeAndGo();
  return failures == 0 ? 0 : 1;
}
