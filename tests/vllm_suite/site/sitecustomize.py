"""For every process of vLLM's tests: engines run without a compiler, and ours counts what it drafted.

`VLLM_SUITE_COUNTS` names a folder: one file per engine, written anew as each request ends. With `VLLM_SUITE_UNSKIPPED`,
a file that skips itself as a whole runs all the same.
"""

import importlib.abc
import importlib.util
import json
import os
import sys

COUNTS = os.environ.get("VLLM_SUITE_COUNTS")


class _After(importlib.abc.MetaPathFinder):
    """Calls a function on a module once it is loaded."""

    def __init__(self, name, change):
        self.name, self.change = name, change

    def find_spec(self, name, path, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        # `python -m` only looks, before it loads
        sys.meta_path.insert(0, self)
        execute = spec.loader.exec_module

        def executes(module):
            execute(module)
            self.change(module)

        spec.loader.exec_module = executes
        return spec


def eager(module):
    right = module.EngineArgs.__post_init__

    def made(self):
        self.enforce_eager = True
        right(self)

    module.EngineArgs.__post_init__ = made


def counted(module):
    mixin, drafted, tokens = module.SchedulerMixin, set(), [0, 0]
    update, free = mixin.update_from_output, mixin._free_request

    def update_from_output(self, scheduled, got):
        for name, drafts in scheduled.scheduled_spec_decode_tokens.items():
            drafted.add(name)
            tokens[0] += len(drafts)
            if name in got.req_id_to_index:
                tokens[1] += max(0, len(got.sampled_token_ids[got.req_id_to_index[name]]) - 1)
        return update(self, scheduled, got)

    def _free_request(self, *args, **kwargs):
        freed = free(self, *args, **kwargs)
        with open(os.path.join(COUNTS, f"{os.getpid()}.json"), "w") as file:
            json.dump({"requests": len(drafted), "drafted": tokens[0], "accepted": tokens[1]}, file)
        return freed

    mixin.update_from_output, mixin._free_request = update_from_output, _free_request


def unskipped(module):
    class Skip(type(module.skip)):
        def __call__(self, reason="", allow_module_level=False):
            if not allow_module_level:
                super().__call__(reason)

    module.skip = Skip()


sys.meta_path.insert(0, _After("vllm.engine.arg_utils", eager))
if os.environ.get("VLLM_SUITE_UNSKIPPED"):
    sys.meta_path.insert(0, _After("pytest", unskipped))
if COUNTS:
    sys.meta_path.insert(0, _After("vllm_specrollout.worker.scheduler", counted))
