"""An index has one owner at a time: the thread that builds it, then, once it is published, the engine's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.unit.history.owned import OwnedIndex
from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.history.background import Background
from vllm_specrollout.history.index_cache import IndexCache
from vllm_specrollout.history.store import HistoryStore
from vllm_specrollout.types import Answer

MakeAnswer = Callable[..., Answer]
PATIENCE_S = 60  # no test waits so long unless it fails


def test_once_an_index_is_published_its_builder_touches_it_no_longer(tmp_path: Path, make_answer: MakeAnswer) -> None:
    config, made = HistoryConfig(dir=str(tmp_path), epochs=2), list[OwnedIndex]()

    def make() -> OwnedIndex:
        made.append(OwnedIndex(min_match=1, max_match=7, max_matches=32))
        return made[-1]

    OwnedIndex.broken.clear()
    builder = Background("build")
    store = HistoryStore(config, Background("disk").submit)
    cache: IndexCache[OwnedIndex] = IndexCache(config, store, make, builder)
    asked = 0
    for number in range(400):
        problem = f"p{number % 7}"
        cache.want(problem)
        if number % 4 == 3:
            # the engine goes on while indices are built, and at times one is there when it asks, however slow the host
            builder.submit(lambda: None).result(PATIENCE_S)
        store.append(make_answer(f"r{number}", problem, epoch=store.epoch, count=50))
        if (index := cache.get(problem)) is not None:
            document = index.open(store.epoch)
            index.append(document, np.arange(20, dtype=np.int32))
            cache.track(problem, f"r{number}", document, store.epoch)
            cache.set_reward(f"r{number}", 1.0)
            asked += 1
        cache.done(problem)
        if number % 40 == 39:
            store.begin_epoch()
    cache.close()
    store.close()
    own = threading.get_ident()
    assert asked > 50 and len(made) > 7 and not OwnedIndex.broken
    # built by one, then asked by the other, and never again by the first
    assert all(one.threads in ([builder._thread.ident], [builder._thread.ident, own], [own], []) for one in made)
    for one in made:
        one.core.check_integrity()
