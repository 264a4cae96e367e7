"""The dry run: every tensor on the meta device, every configuration parsed, nothing measured and no figure printed.

Bytes are exact for what is built, seconds are guesses from assumed bandwidths: they say what to wait for, not how fast
anything is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from vllm_specrollout.config import parse, parse_request

from ..kernels.inputs import make_attention, make_cache, make_commit, make_verdict
from ..kernels.shapes import attentions, caches, verdicts
from . import graphs, models, show
from .plan import Plan, key_of, params, recording, rival

_SECONDS_PER_SHAPE = 0.5  # compiling aside: warm-up, repeats, flushing the cache
_SECONDS_PER_START = 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A line of the table."""

    what: str
    # how many shapes, cells or engines
    count: int
    # most bytes of device memory at once
    num_bytes: int
    seconds: float


def kernels(is_quick: bool) -> Iterator[Item]:
    """Builds every shape's inputs on the meta device."""
    for cache in caches(is_quick):
        paged = make_cache(cache, "meta")
        inputs = [make_attention(case, paged) for case in attentions(cache, is_quick)]
        rows = max(made.query.nbytes for made in inputs)
        yield Item(
            what=f"tree attention {cache.model.name} batch {cache.batch} context {cache.context}",
            count=len(inputs),
            num_bytes=paged.kv.nbytes + 2 * rows,
            seconds=_SECONDS_PER_SHAPE * len(inputs),
        )
    for case in verdicts(is_quick):
        logits = make_verdict(case, "meta")["logits"]
        layers, _ = make_commit(case, "meta")
        yield Item(
            what=f"verify, commit {case.model.name} batch {case.batch} nodes {case.nodes}",
            count=2,
            num_bytes=logits.nbytes + sum(layer.nbytes for layer in layers),
            seconds=2 * _SECONDS_PER_SHAPE,
        )


def engines(plans: Sequence[Plan], scratch: Path) -> Iterator[Item]:
    """Writes every model's folder, and parses every configuration and request option that the engines would get."""
    for plan in plans:
        config = models.CONFIGS[plan.model]
        folder = models.write(plan.model, scratch / plan.model)
        draft = models.write("0.5B", scratch / "draft", config.vocab_size)
        assert plan.arguments(str(folder))["max_model_len"] <= config.max_position_embeddings
        parse(plan.spec_rollout(str(scratch / "oracle.json")))
        for name in plan.rivals:
            rival(name, plan.taus[0], str(draft))
        for cell in plan.cells:
            for tau in plan.taus:
                for values in params(plan, cell, tau):
                    parse_request(values["extra_args"]["spec_rollout"])
                recording([0] * plan.tokens, tau, key_of(cell, tau, 0), config.vocab_size)
        # the engine beside stock; a drafting model comes on top
        each = config.weight_bytes + plan.kv_bytes
        yield Item(
            what=f"engines {plan.model}: stock, ours at {'/'.join(f'{tau:g}' for tau in plan.taus)} tokens a step, "
            + ", ".join(plan.rivals),
            count=len(plan.cells),
            num_bytes=2 * each,
            seconds=plan.total_seconds(),
        )


def graph_arms(name: str, scratch: Path) -> Iterator[Item]:
    """Parses every arm's configuration and plans its graphs."""
    folder = models.write(name, scratch / name)
    for arm in graphs.arms():
        parse(arm.spec_rollout)
        graphs.estimate(arm, folder)
    size = models.CONFIGS[name].weight_bytes + graphs.KV_BYTES
    seconds = _SECONDS_PER_START * len(graphs.arms())
    yield Item(what=f"graph memory {name}", count=len(graphs.arms()), num_bytes=size, seconds=seconds)


def show_plan(console: Console, items: Sequence[Item]) -> None:
    columns: show.Columns = {
        "what": lambda item: item.what,
        "shapes, cells or engines": lambda item: str(item.count),
        "most GiB (estimate)": lambda item: f"{item.num_bytes / 2**30:.2f}",
        "seconds (guess)": lambda item: f"{item.seconds:.0f}",
    }
    show.table(console, "Dry run: nothing was measured", items, columns)
    total = sum(item.seconds for item in items)
    console.print(f"in all about {total / 60:.0f} minutes, if the guesses hold", highlight=False)
