"""The entry point `vllm.general_plugins: spec_rollout`. vLLM calls it in the API process, the engine core and every
worker; `import vllm_specrollout` calls it too, so that `LLM(MODEL, spec_rollout=True)` works.

Light imports only: vLLM itself is not imported here, and nothing fails where vLLM is not installed.
"""

from __future__ import annotations

import multiprocessing

from vllm_specrollout import patches
from vllm_specrollout.config import envs
from vllm_specrollout.errors import logger
from vllm_specrollout.patches import supported
from vllm_specrollout.worker.ending import end_with

_has_warned = False


def register() -> None:
    """Apply our patches, or, on a vLLM we do not know, leave it stock and say so. Calling it again changes nothing.

    Raises:
        UnsupportedError: the environment asks for speculation, and this vLLM's version is not supported.
    """
    if envs.ends_with_parent() and (parent := multiprocessing.parent_process()) is not None and parent.pid is not None:
        end_with(parent.pid)
    version = supported.installed_vllm()
    if version is None:
        return
    problem = supported.version_problem(version)
    if problem is None:
        for process in patches.PROCESSES:
            patches.apply_all(process)
        logger.debug("spec rollout is available: patches for vLLM %s are in place", version)
        return
    if envs.wants_spec_rollout():
        raise problem
    # asked for all the same (keyword aside, which stock vLLM rejects), it must end in this error, not in silence
    patches.apply_all("frontend", guards_only=True)
    global _has_warned
    if not _has_warned:
        logger.warning("--spec-rollout is not available: %s", problem.cause)
        _has_warned = True
