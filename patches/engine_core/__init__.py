"""Names rebound in the process that schedules: one file per upstream target, each only says what is put where."""

from vllm_specrollout.patches.engine_core import patch_engine_core

PATCHES = (*patch_engine_core.PATCHES,)
