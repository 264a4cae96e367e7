"""What a kernel would be compiled for: Triton compiles anew for every key of a launch's arguments."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

Key = tuple[Any, ...]


class Watched:
    """A kernel in Triton's interpreter that notes the key of every launch."""

    def __init__(self, kernel: Any, keys: list[Key]) -> None:
        self.kernel = kernel
        self.keys = keys
        self.parameters = inspect.signature(kernel.fn).parameters
        self.not_specialized = set(kernel.kwargs.get("do_not_specialize") or ())

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> Any:
            self.keys.append((self.kernel.fn.__name__, *self._key(args, kwargs)))
            return self.kernel[grid](*args, **kwargs)

        return launch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.kernel(*args, **kwargs)

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
        options = {name: value for name, value in kwargs.items() if name not in self.parameters}
        given = dict(zip(self.parameters, args, strict=False)) | {k: v for k, v in kwargs.items() if k not in options}
        return sorted(options.items()) + [(name, self._specialized(name, value)) for name, value in given.items()]

    def _specialized(self, name: str, value: Any) -> Any:
        if "constexpr" in str(self.parameters[name].annotation):
            return value
        if isinstance(value, torch.Tensor):
            return value.dtype, value.data_ptr() % 16 == 0
        if not isinstance(value, int):
            return type(value)
        width = "i32" if -(2**31) <= value < 2**31 else "i64"
        if name in self.not_specialized:
            return width
        return 1 if value == 1 else (width, value % 16 == 0)


def watch(monkeypatch: pytest.MonkeyPatch, *kernels: tuple[Any, str]) -> list[Key]:
    """Replace kernels, each (module, name), by watched ones; the keys of their launches are appended to the result."""
    keys: list[Key] = []
    for module, name in kernels:
        monkeypatch.setattr(module, name, Watched(getattr(module, name), keys))
    return keys
