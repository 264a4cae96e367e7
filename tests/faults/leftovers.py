"""What is left of requests that are over: every map, list and field of ours that still names one."""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

KEPT = re.compile(
    r"^runner\.(host\.|drafting\.|spec_rollout\.)*(planned|_planned|_next_withheld|_withheld|step|latest)\b"
    r"|^scheduler\._report\b"
    r"|_store\._(requests|waiting|due|folder)|cache\._(entries|problem_of)"
    r"|\.(texts|library)(\.plan)?\._(named|ring|waiting|unread|problems|owners)\b"
    r"|listeners\[\d\]\._ended\b"
)
"""What remembers requests on purpose: the last step, its drafts and whom the next one withholds; a history and its
texts their answers; and what traces tell of the last requests."""
_OURS = ("vllm_specrollout", "tests.faults")
_LEAVES = (str, bytes, int, float, bool, type(None))


def leftovers(roots: Mapping[str, Any], names: Collection[str]) -> Iterator[str]:
    """Paths from the roots to whatever holds one of these names.

    Followed are containers, and objects of our own classes; vLLM's own hold what they hold.
    """
    seen: set[int] = set()
    stack: list[tuple[str, Any, bool]] = [(path, root, True) for path, root in roots.items()]
    while stack:
        path, one, is_root = stack.pop()
        if isinstance(one, str):
            if one in names:
                yield f"{path} = {one}"
            continue
        if isinstance(one, _LEAVES) or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Mapping):
            for key, value in list(one.items()):
                if isinstance(key, str) and key in names:
                    yield f"{path}[{key}]"
                else:
                    stack.append((f"{path}[{key!r:.40}]", value, False))
                    stack.append((f"{path} key", key, False))
        elif isinstance(one, Collection):
            if type(one).__module__ in ("numpy", "torch"):
                continue
            stack += [(f"{path}[{i}]", value, False) for i, value in enumerate(list(one))]
        elif is_root or type(one).__module__.startswith(_OURS):
            stack += [(f"{path}.{name}", value, False) for name, value in _fields(one)]


def _fields(one: Any) -> Iterator[tuple[str, Any]]:
    yield from list(vars(one).items()) if hasattr(one, "__dict__") else ()
    for kind in type(one).__mro__:
        slots = getattr(kind, "__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(one, name):
                yield name, getattr(one, name)
