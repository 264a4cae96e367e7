"""The C++ core; csrc/bindings.cc says what is in it."""

from typing import Any

def __getattr__(name: str) -> Any: ...
