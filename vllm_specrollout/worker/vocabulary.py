"""Which vocabulary an engine's model has, told apart from others' by its tokens."""

from __future__ import annotations

import hashlib
import json
import logging

from vllm.config import VllmConfig
from vllm.tokenizers import cached_tokenizer_from_config

from vllm_specrollout.history.vocabulary import Vocabulary
from vllm_specrollout.worker.common import config_of

logger = logging.getLogger("vllm.specrollout")


def vocabulary_of(vllm_config: VllmConfig) -> Vocabulary:
    """The model's; its tokens are looked at only if answers are to be kept for other engines."""
    model = vllm_config.model_config
    config = config_of(vllm_config)
    is_shared = "history" in config.drafters and bool(config.history.dir)
    return Vocabulary(model.model, model.get_vocab_size(), _digest(vllm_config) if is_shared else "")


def _digest(vllm_config: VllmConfig) -> str:
    """Of all tokens and their ids; empty where there is no tokenizer."""
    model = vllm_config.model_config
    if model.skip_tokenizer_init:
        return ""
    try:
        tokens = cached_tokenizer_from_config(model).get_vocab()
    except Exception as error:  # a tokenizer is none of the engine's needs: its requests may come as token ids
        logger.info("Spec rollout: no tokenizer, so histories are told apart by the vocabulary's size alone: %s", error)
        return ""
    listed = json.dumps(sorted(tokens.items(), key=lambda item: (item[1], item[0])))
    return hashlib.blake2b(listed.encode(), digest_size=16).hexdigest()
