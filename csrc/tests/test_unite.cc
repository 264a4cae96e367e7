// Uniting small random trees, without Python: meant to be built with the sanitizers on.

#include <cstdint>
#include <cstdio>
#include <random>
#include <stdexcept>
#include <vector>

#include "core/unite.h"

namespace {

int failures = 0;

void Expect(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "failed: %s\n", what);
  ++failures;
}

struct Tree {
  std::vector<int32_t> token_ids, parents, source;
  std::vector<float> log_q;

  specrollout::TreeView View() const {
    return {token_ids.data(), parents.data(), log_q.data(), source.data(), token_ids.size()};
  }
};

void TestSharedNodesAreOneAndTheBestComeFirst() {
  const Tree first{{7, 8}, {-1, 0}, {0, 0}, {-1.0f, -0.5f}};
  const Tree second{{7, 9}, {-1, 0}, {1, 1}, {-0.25f, -0.125f}};
  specrollout::Uniter uniter;
  specrollout::Forest forest;
  forest.Clear();
  uniter.Lay(first.View());
  uniter.Lay(second.View());
  uniter.TakeBest(64, &forest);
  Expect(forest.token_ids == std::vector<int32_t>{7, 9, 8}, "the shared node is one, the likelier child comes first");
  Expect(forest.parents == std::vector<int32_t>{-1, 0, 0}, "both children hang on the shared node");
  Expect(forest.source == std::vector<int32_t>{1, 1, 0}, "a node comes from where it was likeliest");
  Expect(forest.node_start == std::vector<int32_t>{0, 3}, "one tree is behind the forest's beginning");
}

void TestInvariantsHoldOnRandomTrees() {
  std::mt19937 random(5);
  specrollout::Uniter uniter;
  specrollout::Forest forest;
  for (int step = 0; step < 500; ++step) {
    if (step % 7 == 0) forest.Clear();
    const size_t begin = forest.token_ids.size();
    uniter.Begin();
    for (int count = static_cast<int>(random() % 4); count > 0; --count) {
      Tree tree;
      for (int node = static_cast<int>(random() % 65); node > 0; --node) {
        tree.parents.push_back(static_cast<int32_t>(random() % (tree.parents.size() + 1)) - 1);
        tree.token_ids.push_back(static_cast<int32_t>(random() % 3));
        tree.source.push_back(count);
        tree.log_q.push_back(-0.25f * static_cast<float>(random() % 5));
      }
      uniter.Lay(tree.View());
    }
    const int max_nodes = static_cast<int>(random() % 70) - 2;
    uniter.TakeBest(max_nodes, &forest);
    const size_t size = forest.token_ids.size() - begin;
    Expect(size <= static_cast<size_t>(max_nodes < 0 ? 0 : max_nodes), "no more nodes than asked for");
    Expect(forest.node_start.back() == static_cast<int32_t>(forest.token_ids.size()), "the last tree ends the forest");
    std::vector<double> total;
    for (size_t node = 0; node < size; ++node) {
      const int32_t parent = forest.parents[begin + node];
      Expect(parent >= -1 && parent < static_cast<int32_t>(node), "parents come before children");
      total.push_back((parent < 0 ? 0.0 : total[parent]) + forest.log_q[begin + node]);
      Expect(node == 0 || total[node] <= total[node - 1], "the best come first");
    }
  }
}

void TestAParentBehindItsChildIsRefused() {
  for (const int32_t parent : {-2, 0, 1}) {
    const Tree tree{{1}, {parent}, {0}, {-1.0f}};
    specrollout::Uniter uniter;
    bool is_refused = false;
    try {
      uniter.Lay(tree.View());
    } catch (const std::invalid_argument&) {
      is_refused = true;
    }
    Expect(is_refused, "a parent comes before its child");
  }
}

}  // namespace

int main() {
  TestSharedNodesAreOneAndTheBestComeFirst();
  TestInvariantsHoldOnRandomTrees();
  TestAParentBehindItsChildIsRefused();
  return failures == 0 ? 0 : 1;
}
