"""Faults that tests must notice, each in a few lines, put into a module when it is imported.

`MUTANT` in the environment names the fault. Where the faulty code runs, it leaves a file in the folder `MUTANT_MARKS`.
"""

import functools
import importlib.abc
import importlib.util
import os
import sys

import numpy as np

FAULTS = {}


def fault(name, module):
    """What the decorated function does to `module` is the fault of that name."""

    def known(spoil):
        FAULTS[name] = (module, spoil)
        return spoil

    return known


def reached():
    with open(os.path.join(os.environ["MUTANT_MARKS"], str(os.getpid())), "w"):
        pass


def instead(owner, name, make):
    """Replace a function by what `make` returns for it."""
    right = getattr(owner, name)
    setattr(owner, name, functools.wraps(right)(make(right)))


# --- nothing is drafted -----------------------------------------------------------------------------------------------


@fault("always paused", "vllm_specrollout.speculator")
def _(module):
    instead(module.Speculator, "is_paused", lambda right: lambda self, step, num_requests: reached() or True)


@fault("drafters silent", "vllm_specrollout.speculator")
def _(module):
    instead(module.Speculator, "_proposals", lambda right: lambda self, batch, limits, step: reached() or [])


@fault("budget off", "vllm_specrollout.budgets.fixed")
def _(module):
    def chooses(self, proposals, limits, batch, draft_ms):
        reached()
        return module.StepPlan(module.empty_trees(batch.request_ids), "fixed", pays=False)

    instead(module.FixedBudget, "choose", lambda right: chooses)


@fault("budget `auto` never pays", "vllm_specrollout.budgets.goodput")
def _(module):
    def chooses(self, proposals, limits, batch, draft_ms):
        reached()
        return self._without("drafts do not pay", batch, self.cost.plain_ms(batch.size), pays=False)

    instead(module.GoodputBudget, "choose", lambda right: chooses)


def silent(right):
    def proposes(self, batch, limits):
        from vllm_specrollout.types import empty_trees

        reached()
        right(self, batch, limits)
        return empty_trees(batch.request_ids)

    return proposes


@fault("a model's drafts are lost", "vllm_specrollout.worker.models.drafter")
def _(module):
    instead(module.ModelDrafter, "propose", silent)


@fault("the history's drafts are lost", "vllm_specrollout.drafters.history")
def _(module):
    instead(module.HistoryDrafter, "propose", silent)


# --- the verifier -----------------------------------------------------------------------------------------------------


class Core:
    """The C++ core with another `walk`."""

    def __init__(self, right, make):
        self.right, self.walk = right, make(right.walk)

    def __getattr__(self, name):
        return getattr(self.right, name)


def children(node_start, parents, request):
    """Parent -> its children, numbered as all nodes are."""
    found = {}
    for node in range(node_start[request], node_start[request + 1]):
        found.setdefault(int(parents[node]), []).append(node)
    return found


@fault("the verifier steps into a wrong sibling", "vllm_specrollout.worker.v1.sampler")
def _(module):
    def make(walk):
        def walks(node_start, parents, tokens, sampled):
            tokens = tokens.copy()
            for request in range(len(node_start) - 1):
                for own in children(node_start, parents, request).values():
                    if len(own) > 1:
                        tokens[own] = np.roll(tokens[own], 1)
                        reached()
            return walk(node_start, parents, tokens, sampled)

        return walks

    module._core = Core(module._core, make)


@fault("the verifier accepts one token too many", "vllm_specrollout.worker.v1.sampler")
def _(module):
    def make(walk):
        def walks(node_start, parents, tokens, sampled):
            _, _, num_accepted, accepted = walk(node_start, parents, tokens, sampled)
            sampled, ends = sampled.copy(), np.cumsum(num_accepted)
            for request, count in enumerate(num_accepted):
                last = int(accepted[ends[request] - 1]) if count else -1
                if (wrong := children(node_start, parents, request).get(last)) is not None:
                    sampled[node_start[request] + request + 1 + last] = tokens[wrong[0]]
                    reached()
            return walk(node_start, parents, tokens, sampled)

        return walks

    module._core = Core(module._core, make)


@fault("the bonus token is the root row's", "vllm_specrollout.worker.v1.sampler")
def _(module):
    def make(walk):
        def walks(node_start, parents, tokens, sampled):
            output, rows, num_accepted, accepted = walk(node_start, parents, tokens, sampled)
            output = output.copy()
            for request in np.flatnonzero(num_accepted):
                output[request, num_accepted[request]] = sampled[node_start[request] + request]
                reached()
            return output, rows, num_accepted, accepted

        return walks

    module._core = Core(module._core, make)


@fault("end tokens are drafted", "vllm_specrollout.worker.request")
def _(module):
    def make(right):
        def no_ends(params):
            reached()
            return right(params)[:0]

        return no_ends

    instead(module, "ends_of", make)


@fault("a session keeps its first part's limits", "vllm_specrollout.worker.request")
def _(module):
    instead(module.RequestBook, "next_part", lambda right: lambda self, state: reached())


@fault("budgets are left out beside drafts", "vllm_specrollout.worker.v1.thinking")
def _(module):
    def make(right):
        def left_out(holder, trees):
            if right(holder, trees) is not None:
                reached()

        return left_out

    instead(module, "at_roots", make)


# --- the lane ---------------------------------------------------------------------------------------------------------


@fault("always paused, V2 runner", "vllm_specrollout.worker.v2.device_drafts")
def _(module):
    instead(module.DeviceDrafts, "_choose", lambda right: lambda self, batch, modelled: reached() or False)


@fault("drafted rows have the noise of the next position, V2 runner", "vllm_specrollout.worker.v2.verify")
def _(module):
    def make(right):
        def verifies(logits, requests, temperature, seeds, pos, draft_ids, parents, *args, **options):
            reached()
            return right(
                logits, requests, temperature, seeds, pos + (parents >= 0), draft_ids, parents, *args, **options
            )

        return verifies

    instead(module, "tree_verify", make)


@fault("the verifier accepts one draft too many, V2 runner", "vllm_specrollout.worker.v2.verify")
def _(module):
    def make(right):
        def verifies(logits, requests, temperature, seeds, pos, draft_ids, parents, starts, **options):
            verdict = right(logits, requests, temperature, seeds, pos, draft_ids, parents, starts, **options)
            for request, count in enumerate(verdict.num_sampled.tolist()):
                last = int(starts[request]) + int(verdict.path[request, count - 1])
                rows = range(last + 1, int(starts[request + 1]))
                below = [row for row in rows if starts[request] + parents[row] == last and draft_ids[row] >= 0]
                if count and below:
                    reached()
                    verdict.token_ids[request, count - 1] = draft_ids[below[0]]
                    verdict.token_ids[request, count] = draft_ids[below[0]]
                    verdict.path[request, count] = below[0] - int(starts[request])
                    verdict.num_sampled[request] += 1
            return verdict

        return verifies

    instead(module, "tree_verify", make)


@fault("the row of a withheld verdict is not clamped", "vllm_specrollout.worker.v2.verify")
def _(module):
    def make(right):
        def calls(self, logits, batch, inputs, withheld):
            if withheld.any():
                reached()
            return right(self, logits, batch, inputs, withheld & False)

        return calls

    instead(module.TreeVerifier, "__call__", make)


@fault("lookups read another request's text", "vllm_specrollout.worker.v2.told")
def _(module):
    def make(right):
        def asks(self, *args, **options):
            asked = right(self, *args, **options)
            asked.texts[:, 0] = np.roll(asked.texts[:, 0], 1)
            reached()
            return asked

        return asks

    instead(module.ToldRows, "asked", make)


@fault("lines are followed whatever came since", "vllm_specrollout.worker.v2.device_drafts")
def _(module):
    def make(right):
        def chooses(self, batch, modelled):
            import torch

            tokens, lines = self._states.all_token_ids, self._lines
            at = lines[:, :1].long().clamp(min=0) + torch.arange(module.LINE)
            running = tokens.gpu.clone().scatter_(1, at.clamp(max=self._states.max_model_len - 1), lines[:, 1:])
            self._states.all_token_ids = type("Tokens", (), {"gpu": running})
            try:
                return right(self, batch, modelled)
            finally:
                self._states.all_token_ids = tokens
                reached()

        return chooses

    instead(module.DeviceDrafts, "_choose", make)


@fault("a row keeps the drafts of who had it before", "vllm_specrollout.worker.v2.device_drafts")
def _(module):
    def make(right):
        def proposes(self, batch, *args, **options):
            rows = batch.idx_mapping
            kept = self._words[rows].clone()
            right(self, batch, *args, **options)
            reached()
            is_empty = self._words[rows, :1] < 0
            self._words[rows] = kept.where(is_empty, self._words[rows])
            return self._words[rows, : self.width].long()

        return proposes

    instead(module.DeviceDrafts, "propose", make)


# --- what a drafted row computes with ---------------------------------------------------------------------------------


@fault("no KV block moves to its request", "vllm_specrollout.trees.kv_moves")
def _(module):
    def make(right):
        def plans(*args):
            if len(right(*args).source_blocks):
                reached()
            return module.NO_MOVES

        return plans

    instead(module, "plan_moves", make)


@fault("drafted rows have the noise of the next position", "vllm_specrollout.worker.v1.sampler")
def _(module):
    def make(right):
        def seeds(entries, node_start, row_depth):
            reached()
            return right(entries, node_start, row_depth + (row_depth > 0))

        return seeds

    instead(module, "node_seeds", make)


@fault("M-RoPE's positions follow the rows", "vllm_specrollout.worker.v1.cpu_runner")
def _(module):
    def make(right):
        def lays_out(self, trees):
            before = self.mrope_positions.cpu.clone()
            right(self, trees)
            reached()
            self.mrope_positions.cpu.copy_(before)

        return lays_out

    instead(module.SpecRolloutCPURunner, "_lay_out", make)


@fault("M-RoPE's positions follow the rows, V2 runner", "vllm_specrollout.worker.v2.runner")
def _(module):
    instead(module, "follow_depths", lambda right: lambda rope, inputs: reached())


@fault("scratch blocks are not copied", "vllm_specrollout.worker.v1.attention")
def _(module):
    def make(right):
        def plans(*args):
            plan, raw = right(*args)
            if len(raw["copy_from"]):
                reached()
            return plan, {**raw, "copy_from": raw["copy_from"][:0], "copy_to": raw["copy_to"][:0]}

        return plans

    instead(module, "plan_paths", make)


@fault("drafted rows are at the next position", "vllm_specrollout.worker.v1.attention")
def _(module):
    def make(right):
        def plans(*args):
            plan, raw = right(*args)
            reached()
            plan.node_positions[:] += 1
            return plan, raw

        return plans

    instead(module, "plan_paths", make)


@fault("drafted rows have their parents' grammar masks", "vllm.v1.structured_output")
def _(module):
    def make(right):
        def masks(self, requests, request_ids, drafted):
            found = right(self, requests, request_ids, drafted)
            if found is None:
                return None
            found, begin = found.copy(), 0
            for count in (len(drafted.get(name, ())) for name in request_ids):
                if count:
                    found[begin + 1 : begin + count + 1] = found[begin : begin + count].copy()
                    reached()
                begin += count + 1
            return found

        return masks

    instead(module.StructuredOutputManager, "grammar_bitmask", make)


# --- the engine's own check -------------------------------------------------------------------------------------------


@fault("withheld verdicts are never compared", "vllm_specrollout.worker.withheld")
def _(module):
    def forgets(self, request_id, *args):
        reached()
        self.drop(request_id)

    instead(module.Withheld, "compare", lambda right: forgets)


# --- put in place -----------------------------------------------------------------------------------------------------


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, module, spoil):
        self.module, self.spoil = module, spoil

    def find_spec(self, name, path, target=None):
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def executes(module):
            execute(module)
            self.spoil(module)

        spec.loader.exec_module = executes
        return spec


def install():
    sys.meta_path.insert(0, _Finder(*FAULTS[os.environ["MUTANT"]]))
