"""Self-check of an engine on its device: kernels against their twins, then requests with drafts against plain decoding.

What belongs here: what each part asks of the runner. Requests go through the runner's own steps, as vLLM's warm-up
sends them; the blocks they use are cleared, and whatever counts or remembers is set aside meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.distributed.parallel_state import get_tp_group

from vllm_specrollout.errors import logger
from vllm_specrollout.kernels import kv_commit, tree_attention, tree_verify
from vllm_specrollout.kernels.tree_verify.kernel import tree_verify as judge
from vllm_specrollout.kernels.tree_verify.naive import judge as naive_judge
from vllm_specrollout.observe import self_check as record
from vllm_specrollout.observe.guard import CONTAINED
from vllm_specrollout.observe.metrics import Metrics
from vllm_specrollout.observe.self_check import Record, allowed, deadline
from vllm_specrollout.types import DraftMode
from vllm_specrollout.worker.common import Stats
from vllm_specrollout.worker.request import Admissions
from vllm_specrollout.worker.v2.check_steps import CheckRequests, Scripted
from vllm_specrollout.worker.v2.host import Host
from vllm_specrollout.worker.v2.verify import sampled_rows

_ROWS = 64
UNCHECKED = "`self_check` is off, and trees wait for it"


@dataclass(slots=True)
class SelfCheck:
    """One engine's check, from before its kernels are compiled until its verdict."""

    runner: Any
    record: Record
    is_wanted: bool
    # part -> what was wrong
    failed: dict[str, str] = field(default_factory=dict)
    # parts that ran
    passed: list[str] = field(default_factory=list)
    seconds: float = 0.0
    seconds_a_part: float = record.DEADLINE_S

    @classmethod
    def of(cls, runner: Any) -> SelfCheck:
        """That of this engine, which does from now on what is allowed before the check.

        Unasked, only CUDA devices are checked.
        """
        asked, is_cuda = runner.spec_config.self_check, runner.device.type == "cuda"
        is_wanted = asked == "always" or (asked == "auto" and is_cuda)
        is_wanted = is_wanted and runner.shape[0] is not DraftMode.OFF
        found = Record(key_of(runner), device=_own_name(runner.device)) if is_wanted else Record("")
        made = cls(runner, found, is_wanted=is_wanted)
        if not is_wanted and is_cuda and runner.spec_config.shape == "auto":
            limit(runner, DraftMode.CHAIN, UNCHECKED)
            runner.verifier.has_kernel = False
        elif made.is_wanted:
            made.record.join(made._agreed(made.record.start if _is_first() else ""))
            if asked == "auto":
                made.look_back()
            elif _is_first():
                made.record.clear()
        return made

    def look_back(self) -> None:
        """Engines of this kind that died in their own check are a failure."""
        if crash := self._agreed(self.record.crash()):
            self.failed[record.CRASH] = crash
            self.apply()

    def add(self, failed: Mapping[str, str]) -> None:
        """What did not even compile, or could not be captured, here or on another rank."""
        for part in record.PARTS:
            if found := self._agreed(failed.get(part, "")):
                self.failed[part] = found
        if self.failed and not self.is_wanted and self.runner.spec_rollout.guard.is_strict:
            raise RuntimeError(f"kernels do not run here: {self.failed}")
        self.apply()

    def part(self, name: str, run: Callable[[], str]) -> bool:
        """Run a part, unless something of it has failed before; returns whether nothing has.

        Args:
            run: returns what is wrong; nothing: "".
        """
        if name in self.failed:
            return False

        def end() -> None:
            self.record.fault("it hangs")
            os._exit(70)

        self.record.begin(name)
        begin = time.perf_counter()
        try:
            with deadline(name, self.seconds_a_part, end=end):
                found = run()
                if self.runner.device.type == "cuda":
                    torch.cuda.synchronize()
        except CONTAINED as error:
            logger.debug("Spec rollout: the self-check's part `%s`", name, exc_info=error)
            found = record.in_words(error)
        except BaseException:
            self.record.forget()
            raise
        self.seconds += time.perf_counter() - begin
        if found := self._agreed(found):
            self.failed[name] = found
            self.passed = [part for part in self.passed if part != name]
            return False
        if name not in self.passed:
            self.passed.append(name)
        return True

    def _agreed(self, found: str) -> str:
        """What is wrong on any rank, for all of them: they go on alike."""
        group = get_tp_group()
        if group.world_size == 1:
            return found
        told: list[str] = [""] * group.world_size
        torch.distributed.all_gather_object(told, found, group=group.cpu_group)
        return next(filter(None, told), "")

    @torch.inference_mode()
    def run(self) -> None:
        """All parts that this engine needs, and what follows from them."""
        runner = self.runner
        if self.is_wanted and record.CRASH not in self.failed:
            if not self.record.has_passed:
                self.part(record.VERIFY, lambda: check_verify(runner))
            self.apply()
            requests = CheckRequests(runner)
            runner.kv_connector.set_disabled(True)
            try:
                with set_aside(runner, requests.host):
                    self._check_steps(requests)
                    requests.end()
            finally:
                runner.kv_connector.set_disabled(False)
            requests.clear()
            if _is_first():
                self.record.end(self.failed)
            self.record.forget()
        self.apply()
        self._say()

    def _check_steps(self, requests: CheckRequests) -> None:
        """Requests with drafts, from the safest kind of step to the boldest."""
        runner = self.runner
        chains = partial(requests.compare, DraftMode.CHAIN)
        if not self.part(record.CHAINS, lambda: requests.decode() or chains()):
            if runner.verifier.has_kernel and requests.lines:
                # once more without our kernel, which is what would be used then
                self.failed.setdefault(record.VERIFY, self.failed.pop(record.CHAINS))
                self.apply()
                self.part(record.CHAINS, chains)
            if record.CHAINS in self.failed:
                return
        self.apply()
        if runner.max_draft_tokens > 1 and runner._may_branch(len(requests.lines)):
            self.part(record.ATTENTION, requests.shadow)
            self.part(record.COMMIT, requests.move)
            self.part(record.TREES, lambda: requests.compare(DraftMode.TREE))
            self._check_graphs(requests)

    def _check_graphs(self, requests: CheckRequests) -> None:
        """Graphs that none of these requests' steps fits into prove nothing, and are not used."""
        runner, graphs = self.runner, self.runner.draft_graphs.trees
        replayed = runner.draft_graphs.num_replayed
        if graphs is None or not self.part(record.TREE_GRAPHS, lambda: requests.compare(DraftMode.TREE, graphs)):
            return
        if runner.draft_graphs.num_replayed == replayed:
            self.passed.remove(record.TREE_GRAPHS)
            runner.draft_graphs.trees = None
            logger.info("Spec rollout: no step of the self-check fits the CUDA graphs for trees: they are not used")

    def apply(self) -> None:
        """Let the runner do what is still allowed, and no more."""
        runner, rule = self.runner, allowed(self.failed)
        runner.verifier.has_kernel = rule.has_kernel
        part = record.CHAINS if rule.shape is DraftMode.OFF else next(iter(self.failed), "")
        why = f"self-check: {part}: {self.failed[part]}" if self.failed else ""
        limit(runner, rule.shape, why)

    def _say(self) -> None:
        for part in self.passed:
            self.runner.metrics.checked(part, "passed")
        for part, what in self.failed.items():
            self.runner.metrics.checked(part, "failed")
            logger.warning("Spec rollout: the self-check failed on this device in `%s`: %s", part, what)
        if not self.failed:
            if self.is_wanted:
                logger.info("Spec rollout: the self-check passed in %.1f s", self.seconds)
            return
        logger.warning(
            "Spec rollout: drafts are %s here. hint: `specrollout doctor --gpu` checks anew, and says what to report",
            {DraftMode.OFF: "off", DraftMode.CHAIN: "chains only"}.get(allowed(self.failed).shape, "as configured"),
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for whoever asks the worker."""
        state = "failed" if self.failed else "passed" if self.is_wanted else "off"
        return {"state": state, "passed": self.passed, "failed": self.failed, "seconds": round(self.seconds, 2)}


def limit(runner: Any, shape: DraftMode, reason: str) -> None:
    """The runner drafts no more than this from now on."""
    if runner.shape[0] is shape or runner.shape[0] is DraftMode.OFF or shape is DraftMode.TREE:
        return
    runner.shape = (shape, reason)
    runner.admissions = Admissions(shape)
    runner.draft_graphs.trees = None


def key_of(runner: Any) -> str:
    """What a verdict holds for, in 16 hexadecimal digits."""
    config, device = runner.vllm_config, runner.device
    digest = hashlib.sha256()
    for module in (kv_commit, tree_attention, tree_verify, None):
        folder = Path(str(module.__file__)).parent if module is not None else Path(__file__).parent
        for path in sorted(folder.glob("*.py")):
            digest.update(path.read_bytes())
    triton = __import__("triton")
    facts = [
        torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        _driver(),
        torch.__version__,
        triton.__version__,
        vllm.__version__,
        config.model_config.compute_hash(),
        str(config.model_config.dtype),
        config.parallel_config.tensor_parallel_size,
        str(config.compilation_config.cudagraph_mode),
        runner.max_draft_tokens,
        runner.spec_config.max_depth,
        runner.spec_config.shape,
        digest.hexdigest(),
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _own_name(device: torch.device) -> str:
    """By which a device is known on all hosts and in all containers; other platforms have one kind."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type


def _driver() -> str:
    """NVIDIA's, in its own words; empty where there is none."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().partition("\n")[0]
    except OSError:
        return ""


def _is_first() -> bool:
    return bool(get_tp_group().rank_in_group == 0)


class _Quiet(Admissions):
    """Admits requests that nobody sent, so nobody is told why they get less."""

    def _note(self, shape: DraftMode, reason: str) -> None:
        """It is no request of a user's."""


@contextmanager
def set_aside(runner: Any, host: Host | None = None) -> Iterator[None]:
    """Meanwhile steps are nobody's: what counts, remembers and admits is back as it was afterwards.

    Args:
        host: that of the steps; None: one that drafts nothing.
    """
    stand_ins = {
        "host": host or Host(Scripted(), runner.max_model_len),
        "metrics": Metrics(()),
        "stats": Stats(),
        "admissions": _Quiet(runner.shape[0]),
        "model_drafter": None,
    }
    kept = {name: getattr(runner, name) for name in stand_ins}
    vars(runner).update(stand_ins)
    try:
        yield
    finally:
        # a verdict may have changed what it admits
        kept["admissions"] = Admissions(runner.shape[0])
        vars(runner).update(kept)


# --- kernels against their twins --------------------------------------------------------------------------------------


def check_verify(runner: Any) -> str:
    """Our kernel against vLLM's sampler on random rows, bit for bit, and its walk against its specification."""
    device, vocab, verifier = runner.device, runner.vocab_size, runner.verifier
    draw = torch.Generator().manual_seed(0)
    rows = torch.arange(_ROWS)
    temperature = torch.tensor([0.0, 0.7, 1.0, 1.0]).repeat(_ROWS // 4).to(device)
    seeds = torch.randint(0, 1 << 62, (_ROWS,), generator=draw).to(device)
    pos = torch.randint(0, 1 << 16, (_ROWS,), generator=draw).to(device)
    random = (4.0 * torch.randn(_ROWS, vocab, generator=draw)).to(device)
    parents = torch.tensor([-1, 0, 0, 1, 1, 3, 4, 6], dtype=torch.int32).repeat(_ROWS // 8).to(device)
    cu_rows = torch.arange(0, _ROWS + 1, 8, dtype=torch.int32, device=device)
    index = rows.to(device)
    for dtype in {runner.dtype, torch.float32}:
        logits = random.to(dtype)
        sampled = sampled_rows(verifier, logits, index, temperature, seeds, pos)
        # half of the nodes are what was sampled at their parents
        first = rows // 8 * 8
        wanted = sampled.cpu()[first + parents.cpu().clamp(min=0)]
        drafts = torch.where(rows % 2 == 1, wanted, (wanted + 1) % vocab).to(device, torch.int32)
        verdict = judge(
            logits, index, temperature, seeds, pos, drafts, parents, cu_rows,
            width=verifier.width, use_fp64=verifier.sampler.use_fp64_gumbel, is_philox=verifier.is_philox,
        )  # fmt: skip
        lists = [each.tolist() for each in (sampled, drafts, parents, cu_rows)]
        tokens, counts, paths = naive_judge(*lists, verifier.width)
        for what, ours, theirs in (
            ("tokens", verdict.token_ids, tokens),
            ("counts", verdict.num_sampled, counts),
            ("paths", verdict.path, paths),
        ):
            if ours.tolist() != theirs:
                return f"{what} of {dtype} logits are not those of vLLM's sampler"
    return ""
