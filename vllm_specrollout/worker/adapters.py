"""Which LoRA adapters an engine was given, so that new weights under an old name are known to be a new policy.

A trainer of adapters sends each policy under one name, or under one number. A server gives out many adapters, each
under a name of its own, and brings those back that it had to drop: that is no new policy.
"""

from __future__ import annotations

from typing import Any

MOST_NAMES = 4096
"""Names remembered, and numbers; those given first go first."""


class Adapters:
    """Of one worker."""

    def __init__(self) -> None:
        # name -> (number, path) that it was given with last, and the other way round
        self._by_name: dict[str, tuple[int, str]] = {}
        self._names: dict[int, str] = {}
        # numbers that were taken back
        self._removed: dict[int, None] = {}

    def given(self, request: Any, *, is_loaded: bool) -> bool:
        """An adapter was added; whether it takes the place of another one.

        Args:
            request: vLLM's `LoRARequest`.
            is_loaded: its number was loaded before it came: vLLM then keeps what it has, unless it is told to reload.
        """
        if is_loaded and not request.load_inplace:
            return False
        name, number, own = request.lora_name, request.lora_int_id, (request.lora_int_id, request.lora_path)
        is_known = is_loaded or name in self._by_name or number in self._names or number in self._removed
        is_back = (
            self._by_name.get(name) == own
            and self._names.get(number) == name
            and number not in self._removed
            and not request.load_inplace
        )
        self._removed.pop(number, None)
        _remember(self._by_name, name, own)
        _remember(self._names, number, name)
        return is_known and not is_back

    def removed(self, number: int, *, is_loaded: bool) -> None:
        """An adapter is taken back: what comes under its number is another one."""
        if is_loaded or number in self._names:
            _remember(self._removed, number, None)


def _remember(known: dict[Any, Any], key: Any, value: Any) -> None:
    known.pop(key, None)
    known[key] = value
    if len(known) > MOST_NAMES:
        del known[next(iter(known))]
