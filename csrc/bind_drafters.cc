// Python's view of the drafters' index: the arrays in, the arrays out, and no logic.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bind_common.h"
#include "core/history_index.h"
#include "core/history_lookup.h"
#include "core/received.h"

namespace py = pybind11;

namespace specrollout {
namespace {

using IntArray = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;

// Tokens in Python, read without a copy where they are int32 already. Valid while it and the array live.
struct Tokens {
  explicit Tokens(const py::object& given)
      : held(py::isinstance<py::array_t<int32_t, py::array::c_style>>(given) ? py::reinterpret_borrow<IntArray>(given)
                                                                             : Narrowed(given)),
        data(held.data()),
        count(static_cast<size_t>(held.size())) {
    if (held.ndim() != 1) throw std::invalid_argument("token_ids has more or fewer than one dimension");
  }

  // A token that does not fit would become another one.
  static IntArray Narrowed(const py::object& given) {
    const py::array array = py::array::ensure(given);
    if (!array) throw std::invalid_argument("token_ids is no array");
    const char kind = array.dtype().kind();
    if (array.size() && kind != 'i' && kind != 'u') throw std::invalid_argument("token_ids are not whole numbers");
    const auto wide = py::array_t<int64_t, py::array::c_style | py::array::forcecast>::ensure(array);
    for (py::ssize_t i = 0; i < wide.size(); ++i) {
      if (wide.data()[i] != static_cast<int32_t>(wide.data()[i])) {
        throw std::invalid_argument("token " + std::to_string(wide.data()[i]) + " does not fit into 32 bits");
      }
    }
    return IntArray::ensure(array);
  }

  IntArray held;
  const int32_t* data;
  size_t count;
};

py::tuple Columns(std::vector<int32_t>&& node_start, Draft&& draft) {
  return py::make_tuple(Give(std::move(node_start)), Give(std::move(draft.token_ids)), Give(std::move(draft.parents)),
                        Give(std::move(draft.log_q)));
}

// Reused by every proposal of the thread, so that proposing allocates nothing but its result.
HistoryLookup& ThreadLookup() {
  thread_local HistoryLookup lookup;
  return lookup;
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
    if (array.ndim() != 1) throw std::invalid_argument("docs or a bound has more or fewer than one dimension");
    out.assign(array.data(), array.data() + array.size());
  }
  if (out.size() != batch) throw std::invalid_argument("one document and one of each bound per index are needed");
  return out;
}

void SyncHistory(const std::vector<HistoryIndex*>& indices, const py::object& docs, const py::list& texts,
                 const py::object& begins) {
  const size_t batch = indices.size();
  const std::vector<int32_t> of_doc = PerRequest(docs, batch);
  const std::vector<int32_t> begin = PerRequest(begins, batch);
  if (texts.size() != batch) throw std::invalid_argument("one text per index is needed");
  std::vector<Tokens> tokens;
  tokens.reserve(batch);
  for (size_t i = 0; i < batch; ++i) {
    if (indices[i] == nullptr) throw std::invalid_argument("an index is None");
    tokens.emplace_back(py::reinterpret_borrow<py::object>(PyList_GET_ITEM(texts.ptr(), i)));
    if (begin[i] < 0 || static_cast<size_t>(begin[i]) > tokens[i].count) {
      throw std::invalid_argument("a text begins behind its end");
    }
  }
  py::gil_scoped_release release;
  for (size_t i = 0; i < batch; ++i) {
    indices[i]->Sync(of_doc[i], tokens[i].data + begin[i], tokens[i].count - begin[i]);
  }
}

py::tuple ProposeHistory(const std::vector<const HistoryIndex*>& indices, const py::object& docs,
                         const py::object& max_nodes, const py::object& max_depth, const py::object& is_chain,
                         bool siblings, const py::object& end_start, const py::object& end_ids) {
  const size_t batch = indices.size();
  const std::vector<int32_t> of_doc = PerRequest(docs, batch);
  const std::vector<int32_t> nodes = PerRequest(max_nodes, batch);
  const std::vector<int32_t> depths = PerRequest(max_depth, batch);
  const std::vector<int32_t> chains = PerRequest(is_chain, batch);
  std::vector<Ask> asks;
  asks.reserve(batch);
  const bool has_ends = !end_start.is_none();
  const EndLists ends = has_ends ? EndLists(end_start, end_ids, batch) : EndLists();
  for (size_t i = 0; i < batch; ++i) {
    if (nodes[i] <= 0 || depths[i] <= 0) continue;  // nothing is wanted of it
    if (indices[i] == nullptr) throw std::invalid_argument("an index is None");
    asks.push_back({indices[i], of_doc[i], nodes[i], depths[i], chains[i] != 0, has_ends ? ends.Of(i) : Ends{}});
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
  return Columns(std::move(node_start), std::move(all));
}

// The texts of a batch; the arrays of `held` keep them alive.
std::vector<Text> Texts(const py::list& texts, size_t batch, std::vector<Tokens>* held) {
  if (texts.size() != batch) throw std::invalid_argument("one text per handle is needed");
  std::vector<Text> found;
  held->reserve(batch);
  for (size_t i = 0; i < batch; ++i) {
    held->emplace_back(py::reinterpret_borrow<py::object>(PyList_GET_ITEM(texts.ptr(), i)));
    found.push_back({held->back().data, static_cast<int64_t>(held->back().count)});
  }
  return found;
}

py::tuple FitReceived(Received& received, const py::object& handles, const py::list& texts,
                      const py::object& most_nodes, const py::object& most_depth, const py::object& is_chain) {
  py::ssize_t batch = -1;
  const int64_t* own = Read<int64_t>(handles, "handles", &batch);
  std::vector<Tokens> held;
  const std::vector<Text> of = Texts(texts, static_cast<size_t>(batch), &held);
  const int32_t* nodes = Read<int32_t>(most_nodes, "most_nodes", &batch);
  const int32_t* depth = Read<int32_t>(most_depth, "most_depth", &batch);
  const bool* chain = Read<bool>(is_chain, "is_chain", &batch);
  FittingTrees out;
  received.Fit(of.size(), own, of.data(), nodes, depth, chain, &out);
  return py::make_tuple(Give(std::move(out.node_start)), Give(std::move(out.token_ids)), Give(std::move(out.parents)),
                        Give(std::move(out.log_q)), Give(std::move(out.is_first)));
}

template <typename T>
py::bytes Packed(const std::vector<T>& values) {
  return py::bytes(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

py::tuple TellReceived(Received& received, const py::object& handles, const py::list& texts) {
  py::ssize_t batch = -1;
  const int64_t* own = Read<int64_t>(handles, "handles", &batch);
  std::vector<Tokens> held;
  const std::vector<Text> of = Texts(texts, static_cast<size_t>(batch), &held);
  News out;
  received.Tell(of.size(), own, of.data(), &out);
  std::vector<int64_t> told;
  for (const int32_t row : out.index) told.push_back(own[row]);
  return py::make_tuple(Give(std::move(out.index)), Packed(told), Packed(out.counts), Packed(out.token_ids));
}

// The entries of an array that came as bytes; copied, since nothing says that they are aligned.
template <typename T>
std::vector<T> Unpacked(const py::bytes& data, const char* name) {
  const std::string_view view = data;
  if (view.size() % sizeof(T)) throw std::invalid_argument(std::string(name) + " ends within an entry");
  std::vector<T> values(view.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), view.data(), view.size());
  return values;
}

size_t PutReceived(Received& received, const py::bytes& handles, const py::bytes& positions,
                   const py::bytes& node_start, const py::bytes& token_ids, const py::bytes& parents,
                   const py::bytes& ranks, const py::bytes& log_q, int64_t vocab_size) {
  const auto own = Unpacked<int64_t>(handles, "handles");
  const auto at = Unpacked<int32_t>(positions, "positions");
  const auto start = Unpacked<int32_t>(node_start, "node_start");
  const auto tokens = Unpacked<int32_t>(token_ids, "token_ids");
  const auto parent = Unpacked<int32_t>(parents, "parents");
  const auto rank = Unpacked<uint8_t>(ranks, "ranks");
  const auto q = Unpacked<float>(log_q, "log_q");
  const size_t trees = own.size(), nodes = tokens.size();
  bool is_fine = at.size() == trees && start.size() == trees + 1 && parent.size() == nodes && rank.size() == nodes &&
                 q.size() == nodes && start.front() == 0 && static_cast<size_t>(start.back()) == nodes;
  for (size_t t = 0; is_fine && t < trees; ++t) is_fine = start[t] <= start[t + 1];
  if (!is_fine) throw std::invalid_argument("the arrays are of other lengths");
  const ArrivedTrees all{own.data(),    at.data(),   start.data(), tokens.data(),
                         parent.data(), rank.data(), q.data(),     trees};
  const std::string fault = Received::Misshapen(all, vocab_size);
  if (!fault.empty()) throw std::invalid_argument(fault);
  return received.Put(all);
}

py::tuple Counts(const Score& score) { return py::make_tuple(score.tried, score.matched, score.covered); }

}  // namespace
}  // namespace specrollout

void bind_drafters(py::module_& m) {
  using namespace specrollout;
  py::class_<HistoryIndex>(m, "HistoryIndex", "Index over the answers to one problem. One caller at a time per index.")
      .def(py::init<int, int, int>(), py::kw_only(), py::arg("min_match"), py::arg("max_match"), py::arg("max_matches"))
      .def(
          "set_prompt",
          [](HistoryIndex& index, const py::object& token_ids) {
            const Tokens tokens(token_ids);
            py::gil_scoped_release release;
            index.SetPrompt(tokens.data, tokens.count);
          },
          py::arg("token_ids"),
          "The prompt of the documents added from now on; one that the index has is not stored again.")
      .def(
          "add",
          [](HistoryIndex& index, const py::object& token_ids, int32_t weight, int32_t epoch) {
            const Tokens tokens(token_ids);
            py::gil_scoped_release release;
            return index.Add(tokens.data, tokens.count, weight, epoch);
          },
          py::arg("token_ids"), py::arg("weight"), py::arg("epoch"), "A finished answer; returns its document.")
      .def("open", &HistoryIndex::Open, py::arg("epoch"), py::arg("weight") = HistoryIndex::kOne,
           "An answer that grows; returns its document.")
      .def(
          "append",
          [](HistoryIndex& index, int32_t doc, const py::object& token_ids) {
            const Tokens tokens(token_ids);
            py::gil_scoped_release release;
            index.Append(doc, tokens.data, tokens.count);
          },
          py::arg("doc"), py::arg("token_ids"))
      .def(
          "sync",
          [](HistoryIndex& index, int32_t doc, const py::object& token_ids) {
            const Tokens tokens(token_ids);
            py::gil_scoped_release release;
            return index.Sync(doc, tokens.data, tokens.count);
          },
          py::arg("doc"), py::arg("token_ids"),
          "Hold exactly these tokens: append what is new, or start over (and return False) where they changed.")
      .def("set_weight", &HistoryIndex::SetWeight, py::arg("doc"), py::arg("weight"))
      .def("remove", &HistoryIndex::Remove, py::arg("doc"))
      .def("retire", &HistoryIndex::Retire, py::arg("before_epoch"),
           "Remove all documents of earlier epochs; returns how many.")
      .def_property_readonly("num_tokens", &HistoryIndex::num_tokens)
      .def_property_readonly("num_documents", &HistoryIndex::num_documents)
      .def_property_readonly("nbytes", &HistoryIndex::nbytes)
      .def("check_integrity", &HistoryIndex::CheckIntegrity);
  m.def("sync_history", &SyncHistory, py::arg("indices"), py::arg("docs"), py::arg("texts"), py::arg("begins"),
        "`sync` of one document of each index, which is to hold its text from `begins` on.");
  m.def("propose_history", &ProposeHistory, py::arg("indices"), py::arg("docs"), py::arg("max_nodes"),
        py::arg("max_depth"), py::arg("is_chain"), py::arg("siblings") = true, py::arg("end_start") = py::none(),
        py::arg("end_ids") = py::none(),
        "One draft per index, best first, concatenated: (node_start [B + 1], token_ids, parents, log_q). None of them "
        "holds an end token of its request.");
  py::class_<Received>(m, "Received", "The newest draft trees of requests that a drafter elsewhere follows.")
      .def(py::init<>())
      .def("open", &Received::Open, py::arg("handle"), py::arg("num_told"))
      .def(
          "close", [](Received& received, int64_t handle) { return Counts(received.Close(handle)); }, py::arg("handle"),
          "(tried, matched, covered) of the request, which is followed no more.")
      .def(
          "score", [](const Received& received, int64_t handle) { return Counts(received.Of(handle)); },
          py::arg("handle"))
      .def("put", &PutReceived, py::arg("handles"), py::arg("positions"), py::arg("node_start"), py::arg("token_ids"),
           py::arg("parents"), py::arg("ranks"), py::arg("log_q"), py::arg("vocab_size"))
      .def("fit", &FitReceived, py::arg("handles"), py::arg("texts"), py::arg("most_nodes"), py::arg("most_depth"),
           py::arg("is_chain"))
      .def("tell", &TellReceived, py::arg("handles"), py::arg("texts"));
}
