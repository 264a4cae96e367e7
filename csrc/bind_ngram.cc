// Python's view of the n-gram index: the arrays in, the arrays out, and no logic.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "core/ngram_index.h"

namespace py = pybind11;

namespace specrollout {
namespace {

using IntArray = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;
using BoolArray = py::array_t<bool, py::array::c_style | py::array::forcecast>;

template <typename T>
py::array_t<T> ToNumpy(const std::vector<T>& values) {
  return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

void RequireVector(const py::array& array, const char* name) {
  if (array.ndim() != 1) throw std::invalid_argument(std::string(name) + " has more or fewer than one dimension");
}

// Reused by every proposal of the thread, so that proposing allocates nothing but its result.
Trie& ThreadTrie() {
  thread_local Trie trie;
  return trie;
}

bool Sync(NgramIndex& index, const IntArray& token_ids) {
  RequireVector(token_ids, "token_ids");
  const int32_t* data = token_ids.data();
  const size_t count = token_ids.size();
  py::gil_scoped_release release;
  return index.Sync(data, count);
}

void Append(NgramIndex& index, const IntArray& token_ids) {
  RequireVector(token_ids, "token_ids");
  const int32_t* data = token_ids.data();
  const size_t count = token_ids.size();
  py::gil_scoped_release release;
  index.Append(data, count);
}

py::tuple Propose(const NgramIndex& index, int max_nodes, int max_depth, bool chain) {
  Draft draft;
  {
    py::gil_scoped_release release;
    index.Propose(max_nodes, max_depth, chain, &ThreadTrie(), &draft);
  }
  return py::make_tuple(ToNumpy(draft.token_ids), ToNumpy(draft.parents), ToNumpy(draft.log_q));
}

py::tuple ProposeBatch(const std::vector<const NgramIndex*>& indices, const IntArray& max_nodes,
                       const IntArray& max_depth, const BoolArray& chain) {
  const size_t batch = indices.size();
  for (const py::array& array : {py::array(max_nodes), py::array(max_depth), py::array(chain)}) {
    RequireVector(array, "a bound");
    if (static_cast<size_t>(array.size()) != batch) throw std::invalid_argument("one bound per index is needed");
  }
  const int32_t* nodes = max_nodes.data();
  for (size_t i = 0; i < batch; ++i) {
    if (indices[i] == nullptr && nodes[i] > 0) throw std::invalid_argument("an index is None");
  }
  const int32_t* depth = max_depth.data();
  const bool* is_chain = chain.data();
  Draft all;
  std::vector<int32_t> offsets{0};
  {
    py::gil_scoped_release release;
    Draft draft;
    for (size_t i = 0; i < batch; ++i) {
      if (nodes[i] <= 0 || depth[i] <= 0) {  // nothing is wanted of it
        offsets.push_back(static_cast<int32_t>(all.token_ids.size()));
        continue;
      }
      indices[i]->Propose(nodes[i], depth[i], is_chain[i], &ThreadTrie(), &draft);
      all.token_ids.insert(all.token_ids.end(), draft.token_ids.begin(), draft.token_ids.end());
      all.parents.insert(all.parents.end(), draft.parents.begin(), draft.parents.end());
      all.log_q.insert(all.log_q.end(), draft.log_q.begin(), draft.log_q.end());
      offsets.push_back(static_cast<int32_t>(all.token_ids.size()));
    }
  }
  return py::make_tuple(ToNumpy(offsets), ToNumpy(all.token_ids), ToNumpy(all.parents), ToNumpy(all.log_q));
}

}  // namespace
}  // namespace specrollout

void bind_ngram(py::module_& m) {
  using specrollout::NgramIndex;
  py::class_<NgramIndex>(m, "NgramIndex", "Index over one request's tokens. One caller at a time per index.")
      .def(py::init<int, int, int>(), py::kw_only(), py::arg("min_match"), py::arg("max_match"), py::arg("max_matches"))
      .def("__len__", &NgramIndex::size)
      .def("append", &specrollout::Append, py::arg("token_ids"))
      .def("sync", &specrollout::Sync, py::arg("token_ids"),
           "Hold exactly these tokens: append what is new, or start over (and return False) where they changed.")
      .def("propose", &specrollout::Propose, py::arg("max_nodes"), py::arg("max_depth"), py::arg("chain"),
           "(token_ids, parents, log_q), best first.")
      .def("check_integrity", &NgramIndex::CheckIntegrity);
  m.def("propose_batch", &specrollout::ProposeBatch, py::arg("indices"), py::arg("max_nodes"), py::arg("max_depth"),
        py::arg("chain"), "One draft per index, concatenated: (node_start [B + 1], token_ids, parents, log_q).");
}
