"""Drafters: propose the next tokens of running requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from vllm_specrollout.config import by_name
from vllm_specrollout.drafters.base import BaseDrafter, Drafter, Place
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.history.vocabulary import ANY_VOCABULARY, Vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from vllm_specrollout.config import SpecRolloutConfig
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
        ConfigError: a class that the configuration names cannot be used.
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
    if by_name.is_qualified(name):
        place = Place(source, config.max_draft_tokens, vocabulary.size)
        return _named(name, place, config.drafter_options.get(name, {}))
    # imported late: naming one drafter must not need what another one needs
    if make_texts is not None:
        from vllm_specrollout.drafters.looked_up import LookedUpHistory, LookedUpNgram

        is_history = name == "history"
        return LookedUpHistory(config.history, make_texts, vocabulary=vocabulary) if is_history else LookedUpNgram()
    if name == "ngram":
        from vllm_specrollout.drafters.ngram import NgramDrafter

        return NgramDrafter(config.ngram, config.max_draft_tokens, source)
    if name == "history":
        from vllm_specrollout.drafters.history import HistoryDrafter

        return HistoryDrafter(config.history, config.max_draft_tokens, source, vocabulary=vocabulary)
    raise AssertionError(f"the configuration let an unknown drafter through: {name!r}")


def check_named(config: SpecRolloutConfig) -> None:
    """Import the classes that the configuration names, and look at their options; none is made.

    Raises:
        ConfigError: one cannot be imported, is no drafter, or does not take its options.
    """
    for name in filter(by_name.is_qualified, config.drafters):
        cls = by_name.load("drafters", name, Drafter, BaseDrafter)
        by_name.check_options("drafters", name, cls, config.drafter_options.get(name, {}))


def _named(name: str, place: Place, options: Mapping[str, Any]) -> Drafter:
    made = cast(Drafter, by_name.make("drafters", name, Drafter, BaseDrafter, (place,), options))
    if made.num_sources != 1:
        cause = f"`drafters` names `{name}`, which tells {made.num_sources} kinds of nodes apart"
        raise ConfigError(cause, "name a class of one kind each")
    # what metrics, traces and the log call it is what the configuration does
    made.name = name
    return made
