"""What a store would hand out now."""

from __future__ import annotations

from vllm_specrollout.history.answers import Answer
from vllm_specrollout.history.store import HistoryStore


def answers_in(store: HistoryStore, problem_id: str) -> list[Answer]:
    """The problem's answers of this epoch and the last `config.epochs`, older epochs first."""
    found = (store.read(located, problem_id) for located in store.find(problem_id))
    return [answer for answer in found if answer is not None]
