"""What a store would hand out now, and what a file holds."""

import contextlib
from pathlib import Path

from vllm_specrollout.history.database import Database, answer_of
from vllm_specrollout.history.store import HistoryStore
from vllm_specrollout.types import Answer


def answers_in(store: HistoryStore, problem_id: str) -> list[Answer]:
    """The problem's answers of this epoch and the last `config.epochs`, older epochs first."""
    found = (store.read(located, problem_id) for located in store.find(problem_id))
    return [answer for answer in found if answer is not None]


def names(store: HistoryStore, problem_id: str = "p") -> list[str]:
    return [answer.request_id for answer in answers_in(store, problem_id)]


def answers_of(path: Path) -> list[Answer]:
    """All answers of a file that can be read, with their last rewards, in the order they were written."""
    found = list[Answer]()
    for row in Database(path).rows():
        with contextlib.suppress(ValueError):
            found.append(answer_of(row))
    return found
