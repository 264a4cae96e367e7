// Python's view of uniting: lists of arrays in, arrays out, and no logic.
//
// Every step passes four small arrays per tree, so what counts here is the price of looking at one: lists are read in
// place, and arrays are checked rather than converted. The GIL is kept: some microseconds per request are less than the
// wait for its return when another thread takes it.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "core/unite.h"

namespace py = pybind11;

namespace specrollout {
namespace {

template <typename T>
py::array_t<T> ToNumpy(const std::vector<T>& values) {
  return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

// One column of one tree; `size` is the tree's, or negative where this column tells it.
template <typename T>
const T* Column(const py::list& arrays, size_t tree, const char* name, py::ssize_t* size) {
  const py::handle item = PyList_GET_ITEM(arrays.ptr(), static_cast<Py_ssize_t>(tree));
  if (!py::isinstance<py::array_t<T, py::array::c_style>>(item)) {
    throw std::invalid_argument(std::string(name) + " of tree " + std::to_string(tree) +
                                " is not a contiguous array of " + py::str(py::dtype::of<T>()).cast<std::string>());
  }
  const auto array = py::reinterpret_borrow<py::array>(item);
  if (array.ndim() != 1 || (*size >= 0 && array.size() != *size)) {
    throw std::invalid_argument(std::string(name) + " of tree " + std::to_string(tree) +
                                " does not have one entry per node");
  }
  *size = array.size();
  return static_cast<const T*>(array.data());
}

int Number(const py::list& numbers, size_t i) {
  return py::handle(PyList_GET_ITEM(numbers.ptr(), static_cast<Py_ssize_t>(i))).cast<int>();
}

py::tuple Unite(const py::list& token_ids, const py::list& parents, const py::list& log_q, const py::list& source,
                const py::list& num_trees, const py::list& max_nodes) {
  const size_t trees = token_ids.size();
  if (parents.size() != trees || log_q.size() != trees || source.size() != trees) {
    throw std::invalid_argument("token_ids, parents, log_q and source must have one array per tree each");
  }
  if (num_trees.size() != max_nodes.size()) {
    throw std::invalid_argument("num_trees and max_nodes must have one number per request each");
  }
  // reused by every call of the thread
  thread_local Uniter uniter;
  thread_local Forest forest;
  forest.Clear();
  size_t tree = 0;
  for (size_t request = 0; request < num_trees.size(); ++request) {
    const int own = Number(num_trees, request);
    if (own < 0 || static_cast<size_t>(own) > trees - tree) break;
    uniter.Begin();
    for (const size_t end = tree + own; tree < end; ++tree) {
      py::ssize_t size = -1;
      TreeView view{};
      view.token_ids = Column<int32_t>(token_ids, tree, "token_ids", &size);
      view.parents = Column<int32_t>(parents, tree, "parents", &size);
      view.log_q = Column<float>(log_q, tree, "log_q", &size);
      view.source = Column<int32_t>(source, tree, "source", &size);
      view.size = static_cast<size_t>(size);
      uniter.Lay(view);
    }
    uniter.TakeBest(Number(max_nodes, request), &forest);
  }
  if (tree != trees || forest.node_start.size() != num_trees.size() + 1) {
    throw std::invalid_argument("num_trees must add up to the number of trees");
  }
  return py::make_tuple(ToNumpy(forest.node_start), ToNumpy(forest.token_ids), ToNumpy(forest.parents),
                        ToNumpy(forest.log_q), ToNumpy(forest.source));
}

}  // namespace
}  // namespace specrollout

void bind_unite(py::module_& m) {
  m.def("unite", &specrollout::Unite, py::arg("token_ids"), py::arg("parents"), py::arg("log_q"), py::arg("source"),
        py::arg("num_trees"), py::arg("max_nodes"),
        "One tree per request out of the next `num_trees` trees, best first, concatenated: (node_start [R + 1], "
        "token_ids, parents, log_q, source).");
}
