"""Drafters: propose the next tokens of running requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_specrollout.history.vocabulary import ANY_VOCABULARY, Vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_specrollout.config import SpecRolloutConfig
    from vllm_specrollout.drafters.base import Drafter
    from vllm_specrollout.history.store import HistoryStore
    from vllm_specrollout.history.texts import Texts


def build(
    config: SpecRolloutConfig,
    vocabulary: Vocabulary = ANY_VOCABULARY,
    make_texts: Callable[[HistoryStore], Texts] | None = None,
) -> list[Drafter]:
    """The drafters that the configuration names, in its order; a tree's `source` is the index in this list.

    Args:
        vocabulary: the model's; what comes from outside the engine is looked at for tokens that it does not have.
        make_texts: where drafts are looked up on a device, the texts for it, over a store of answers.

    Raises:
        ConfigError: the recorded continuations of the `oracle` drafter cannot be used.
        UnsupportedError: the C++ module is not built.
    """
    return [_build_one(name, config, source, vocabulary, make_texts) for source, name in enumerate(config.drafters)]


def _build_one(
    name: str,
    config: SpecRolloutConfig,
    source: int,
    vocabulary: Vocabulary,
    make_texts: Callable[[HistoryStore], Texts] | None,
) -> Drafter:
    # imported late: naming one drafter must not need what another one needs
    if make_texts is not None and name != "oracle":
        from vllm_specrollout.drafters.looked_up import LookedUpHistory, LookedUpNgram

        is_history = name == "history"
        return LookedUpHistory(config.history, make_texts, vocabulary=vocabulary) if is_history else LookedUpNgram()
    if name == "ngram":
        from vllm_specrollout.drafters.ngram import NgramDrafter

        return NgramDrafter(config.ngram, config.max_draft_tokens, source)
    if name == "history":
        from vllm_specrollout.drafters.history import HistoryDrafter

        return HistoryDrafter(config.history, config.max_draft_tokens, source, vocabulary=vocabulary)
    if name == "oracle":
        from vllm_specrollout.drafters.oracle import OracleDrafter, load_continuations

        return OracleDrafter(config.oracle, load_continuations(config.oracle.path, vocabulary.size), source)
    raise AssertionError(f"the configuration let an unknown drafter through: {name!r}")
