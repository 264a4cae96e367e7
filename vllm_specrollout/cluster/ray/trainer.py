"""Trainer's own actors, asked for what their engines' workers know. Nothing of the trainer is changed for that.

An actor of verl or OpenRLHF has an `AsyncLLM` inside, and no call that hands on what a worker's method answers (verl's
`collective_rpc` returns nothing). Every actor of Ray can be asked to run a function, though, and that one asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import ray

from vllm_specrollout.cluster.batch import GroupError
from vllm_specrollout.cluster.lending import PATIENCE_S, Ask, Lending


def lend(actors: Mapping[str, Any] | Sequence[Any], **given: Any) -> Lending:
    """From now on, the drafters of idle engines are lent to stragglers of the others, by a thread of this process.

    Args:
        actors: with an engine in each; by name, or in any order.
        given: `drafter`, `devices`, `drafter_engine` and `most`, as of `Lending`.
    """
    named = actors if isinstance(actors, Mapping) else {f"engine-{i}": actor for i, actor in enumerate(actors)}
    lending = Lending({name: asking(actor) for name, actor in named.items()}, **given)
    lending.start()
    return lending


def asking(actor: Any) -> Ask:
    """How the engine in this actor is asked."""

    def ask(method: str, args: tuple[Any, ...]) -> Future[Sequence[Any]]:
        if not ray.is_initialized():  # a call would begin it anew
            raise GroupError("Ray has ended, and with it the engines", "call `close` of what `lend` returned before")
        return actor.__ray_call__.remote(inside, method, args).future()

    return ask


def inside(actor: Any, method: str, args: tuple[Any, ...]) -> list[Any]:
    """Ask the engine of this actor, in its process. Ray runs this beside the loop that has the engine."""
    engine = getattr(actor, "engine", None) or actor.llm  # verl's, OpenRLHF's
    asked = engine.collective_rpc(method, args=args)
    return asyncio.run_coroutine_threadsafe(asked, engine.output_handler.get_loop()).result(PATIENCE_S)
