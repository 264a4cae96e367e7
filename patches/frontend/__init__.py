"""Names rebound in the process that takes requests: one file per upstream target, each only says what is put where."""

from vllm_specrollout.patches.frontend import (
    patch_async_llm,
    patch_engine_args_cli,
    patch_engine_args_create,
    patch_engine_args_init,
    patch_input_processor,
    patch_prometheus,
    patch_stop_strings,
)

PATCHES = (
    *patch_engine_args_init.PATCHES,
    *patch_engine_args_cli.PATCHES,
    *patch_engine_args_create.PATCHES,
    *patch_input_processor.PATCHES,
    *patch_async_llm.PATCHES,
    *patch_prometheus.PATCHES,
    *patch_stop_strings.PATCHES,
)
