// What all bindings share: arrays read in place, and handed over without a copy.

#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace specrollout {

// The memory of a contiguous array; `size` is what it must have, or negative where this array tells it.
template <typename T>
const T* Read(const pybind11::handle& array, const char* name, pybind11::ssize_t* size, int dimensions = 1) {
  namespace py = pybind11;
  if (!py::isinstance<py::array_t<T, py::array::c_style>>(array)) {
    throw std::invalid_argument(std::string(name) + " is not a contiguous array of " +
                                py::str(py::dtype::of<T>()).template cast<std::string>());
  }
  const auto own = py::reinterpret_borrow<py::array>(array);
  if (own.ndim() != dimensions || (*size >= 0 && own.size() != *size)) {
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(own.size()) + " entries" +
                                (*size >= 0 ? ", not " + std::to_string(*size) : "") + ", or another shape");
  }
  *size = own.size();
  return static_cast<const T*>(own.data());
}

// Hands a vector's memory to numpy.
template <typename T>
pybind11::array_t<T> Give(std::vector<T>&& values) {
  auto* owned = new std::vector<T>(std::move(values));
  pybind11::capsule free_when_done(owned, [](void* p) { delete static_cast<std::vector<T>*>(p); });
  return pybind11::array_t<T>(static_cast<pybind11::ssize_t>(owned->size()), owned->data(), free_when_done);
}

}  // namespace specrollout
