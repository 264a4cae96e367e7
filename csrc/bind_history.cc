// Python's view of the history index: the arrays in, the arrays out, and no logic.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "core/history_index.h"
#include "core/history_lookup.h"

namespace py = pybind11;

namespace specrollout {
namespace {

using IntArray = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;

template <typename T>
py::array_t<T> ToNumpy(const std::vector<T>& values) {
  return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

void RequireVector(const py::array& array, const char* name) {
  if (array.ndim() != 1) throw std::invalid_argument(std::string(name) + " has more or fewer than one dimension");
}

// Reused by every proposal of the thread, so that proposing allocates nothing but its result.
HistoryLookup& ThreadLookup() {
  thread_local HistoryLookup lookup;
  return lookup;
}

void SetPrompt(HistoryIndex& index, const IntArray& token_ids) {
  RequireVector(token_ids, "token_ids");
  const int32_t* data = token_ids.data();
  const size_t count = token_ids.size();
  py::gil_scoped_release release;
  index.SetPrompt(data, count);
}

int32_t Add(HistoryIndex& index, const IntArray& token_ids, int32_t weight, int32_t epoch) {
  RequireVector(token_ids, "token_ids");
  const int32_t* data = token_ids.data();
  const size_t count = token_ids.size();
  py::gil_scoped_release release;
  return index.Add(data, count, weight, epoch);
}

void Append(HistoryIndex& index, int32_t doc, const IntArray& token_ids) {
  RequireVector(token_ids, "token_ids");
  const int32_t* data = token_ids.data();
  const size_t count = token_ids.size();
  py::gil_scoped_release release;
  index.Append(doc, data, count);
}

bool Sync(HistoryIndex& index, int32_t doc, const IntArray& token_ids) {
  RequireVector(token_ids, "token_ids");
  const int32_t* data = token_ids.data();
  const size_t count = token_ids.size();
  py::gil_scoped_release release;
  return index.Sync(doc, data, count);
}

// One number per request, from a list or an array. Lists are short and come every step: numpy would take longer.
std::vector<int32_t> PerRequest(const py::object& numbers, size_t batch) {
  std::vector<int32_t> out;
  if (PyList_CheckExact(numbers.ptr())) {
    const Py_ssize_t count = PyList_GET_SIZE(numbers.ptr());
    out.reserve(count);
    for (Py_ssize_t i = 0; i < count; ++i) out.push_back(py::handle(PyList_GET_ITEM(numbers.ptr(), i)).cast<int32_t>());
  } else {
    const IntArray array = numbers.cast<IntArray>();
    RequireVector(array, "docs or a bound");
    out.assign(array.data(), array.data() + array.size());
  }
  if (out.size() != batch) throw std::invalid_argument("one document and one of each bound per index are needed");
  return out;
}

py::tuple Propose(const std::vector<const HistoryIndex*>& indices, const py::object& docs, const py::object& max_nodes,
                  const py::object& max_depth, const py::object& is_chain, bool siblings) {
  const size_t batch = indices.size();
  const std::vector<int32_t> of_doc = PerRequest(docs, batch);
  const std::vector<int32_t> nodes = PerRequest(max_nodes, batch);
  const std::vector<int32_t> depths = PerRequest(max_depth, batch);
  const std::vector<int32_t> chains = PerRequest(is_chain, batch);
  std::vector<Ask> asks;
  asks.reserve(batch);
  for (size_t i = 0; i < batch; ++i) {
    if (nodes[i] <= 0 || depths[i] <= 0) continue;  // nothing is wanted of it
    if (indices[i] == nullptr) throw std::invalid_argument("an index is None");
    asks.push_back({indices[i], of_doc[i], nodes[i], depths[i], chains[i] != 0});
  }
  Draft all;
  std::vector<int32_t> asked_start, node_start(1, 0);
  {
    py::gil_scoped_release release;
    ThreadLookup().Propose(asks, siblings, &all, &asked_start);
    size_t asked = 0;
    for (size_t i = 0; i < batch; ++i) {
      asked += nodes[i] > 0 && depths[i] > 0;
      node_start.push_back(asked_start[asked]);
    }
  }
  return py::make_tuple(ToNumpy(node_start), ToNumpy(all.token_ids), ToNumpy(all.parents), ToNumpy(all.log_q));
}

}  // namespace
}  // namespace specrollout

void bind_history(py::module_& m) {
  using specrollout::HistoryIndex;
  py::class_<HistoryIndex>(m, "HistoryIndex", "Index over the answers to one problem. One caller at a time per index.")
      .def(py::init<int, int, int>(), py::kw_only(), py::arg("min_match"), py::arg("max_match"), py::arg("max_matches"))
      .def("set_prompt", &specrollout::SetPrompt, py::arg("token_ids"),
           "The prompt of the documents added from now on; one that the index has is not stored again.")
      .def("add", &specrollout::Add, py::arg("token_ids"), py::arg("weight"), py::arg("epoch"),
           "A finished answer; returns its document.")
      .def("open", &HistoryIndex::Open, py::arg("epoch"), py::arg("weight") = HistoryIndex::kOne,
           "An answer that grows; returns its document.")
      .def("append", &specrollout::Append, py::arg("doc"), py::arg("token_ids"))
      .def("sync", &specrollout::Sync, py::arg("doc"), py::arg("token_ids"),
           "Hold exactly these tokens: append what is new, or start over (and return False) where they changed.")
      .def("set_weight", &HistoryIndex::SetWeight, py::arg("doc"), py::arg("weight"))
      .def("remove", &HistoryIndex::Remove, py::arg("doc"))
      .def("retire", &HistoryIndex::Retire, py::arg("before_epoch"),
           "Remove all documents of earlier epochs; returns how many.")
      .def_property_readonly("num_tokens", &HistoryIndex::num_tokens)
      .def_property_readonly("num_documents", &HistoryIndex::num_documents)
      .def_property_readonly("nbytes", &HistoryIndex::nbytes)
      .def("check_integrity", &HistoryIndex::CheckIntegrity);
  m.def("propose_history", &specrollout::Propose, py::arg("indices"), py::arg("docs"), py::arg("max_nodes"),
        py::arg("max_depth"), py::arg("is_chain"), py::arg("siblings") = true,
        "One draft per index, best first, concatenated: (node_start [B + 1], token_ids, parents, log_q).");
}
