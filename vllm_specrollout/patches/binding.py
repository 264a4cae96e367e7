"""What is said of an object of vLLM's that we change where it stands."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = {
    "rebind": "another object under a name of vLLM's",
    "wrap": "an object of vLLM's is called through one of ours",
    "swap": "a field of vLLM's gets another value, for good or for one call",
    "piggyback": "ours travels on an object of vLLM's",
}


@dataclass(frozen=True, slots=True)
class Binding:
    """One object of vLLM's that is changed where it stands."""

    kind: str
    # what is changed, as our code writes it
    target: str
    # our file, from the package's folder on
    where: str
    why: str
