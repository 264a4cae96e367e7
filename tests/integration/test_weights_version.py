"""How a worker learns that its policy has changed, and what it takes for nothing."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import SchedulerOutput

from tests.faults.devices import Device, RunnerV1
from tests.faults.target import Cache
from vllm_specrollout.budgets.fixed import OffBudget
from vllm_specrollout.errors import UnsupportedError
from vllm_specrollout.observe.metrics import Metrics
from vllm_specrollout.speculator import Speculator
from vllm_specrollout.worker import weights_version
from vllm_specrollout.worker.drafting import begin_step
from vllm_specrollout.worker.weights_version import (
    MOST_ELEMENTS,
    MOST_PARAMETERS,
    Fingerprint,
    WeightsMixin,
    WeightsVersion,
)


class Model(torch.nn.Module):
    """With a parameter of each kind that there is: transposed, packed, in another type."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 96) for _ in range(layers))
        self.transposed = torch.nn.Parameter(torch.randn(32, 48).t())
        self.packed = torch.nn.Parameter(torch.empty(0))
        self.narrow = torch.nn.Parameter(torch.randn(40, 16).to(torch.float8_e4m3fn), requires_grad=False)

    def load_weights(self, weights: Any) -> None:
        with torch.no_grad():
            for name, weight in weights:
                self.get_parameter(name).copy_(weight)


def step(num_new: int = 0, num_running: int = 2, **more: Any) -> Any:
    scheduled = dict.fromkeys(map(str, range(num_new + num_running)), 1)
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(lora_request=None)] * num_new,
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=len(scheduled),
        **more,
    )


def signalled() -> Any:
    return step(spec_rollout_signalled=True)


def watched(model: Model) -> WeightsVersion:
    version = WeightsVersion()
    version.watch(model)
    begin_step(version, step())
    assert version.number == 0
    return version


@torch.no_grad()
def test_a_fingerprint_sees_any_parameter_that_was_written_and_one_replaced() -> None:
    torch.manual_seed(0)
    model = Model()
    look = Fingerprint(model).take
    seen = [look()]
    assert look() == seen[0] and len(seen[0]) == 16
    for write in (
        lambda: model.layers[1].weight.mul_(1.5),
        lambda: model.transposed.add_(1.0),
        lambda: model.narrow.copy_(torch.randn(40, 16).to(torch.float8_e4m3fn)),
        lambda: setattr(model.layers[0], "bias", torch.nn.Parameter(torch.ones(96))),
    ):
        write()
        seen.append(look())
    assert len(set(seen)) == len(seen)


class Wrapped(torch.Tensor):
    """Weights in another form, as torchao's are: tensors of which few operations are defined."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise NotImplementedError(f"no {func} of such weights")


@torch.no_grad()
def test_parameters_that_cannot_be_looked_at_are_left_out_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    for layer in (model.layers[0], model.layers[1]):
        layer.weight = torch.nn.Parameter(Wrapped(torch.randn(96, 64)), requires_grad=False)
    version = watched(model)
    # one that comes later, in the place of one that was looked at
    model.transposed = torch.nn.Parameter(Wrapped(torch.randn(48, 32)), requires_grad=False)
    begin_step(version, signalled())
    number = version.number
    begin_step(version, signalled())
    assert version.number == number
    model.layers[0].bias.add_(1.0)
    begin_step(version, signalled())
    assert version.number == number + 1, "all others are looked at"
    assert [record.message for record in caplog.records if "Wrapped" in record.message] == [
        "Spec rollout: parameters of type Wrapped cannot be looked at (no aten.as_strided.default of such weights). "
        "That such weights are written in place goes unnoticed; weights that come through vLLM are noticed all the same"
    ]


@torch.no_grad()
def test_of_large_models_little_is_looked_at_and_a_small_update_in_bfloat16_is_seen_all_the_same() -> None:
    torch.manual_seed(0)
    model = Model(layers=40).to(torch.bfloat16)
    look = Fingerprint(model)
    before = look.take()
    assert len(look._chosen) == MOST_PARAMETERS
    written = [parameter for parameter in model.parameters() if parameter.numel()]
    for parameter in written:
        # about one element in a hundred comes out as another number
        noise = torch.rand(parameter.shape) < 0.01
        parameter.copy_(torch.where(noise, parameter.float() * 1.02 + 0.01, parameter.float()))
    assert look.take() != before
    assert MOST_PARAMETERS * MOST_ELEMENTS == 4096


@torch.no_grad()
def test_weights_written_in_place_are_noticed_at_the_next_sign_and_an_empty_sign_changes_nothing() -> None:
    model = Model()
    version = watched(model)
    for sign in (signalled, lambda: step(num_new=3, num_running=0)):
        begin_step(version, sign())
        before = version.number
        model.layers[0].weight.add_(1.0)
        begin_step(version, step())
        assert version.number == before, "without a sign nobody looks"
        begin_step(version, sign())
        begin_step(version, sign())
        assert version.number == before + 1
    # requests that come to others are no sign
    model.layers[0].weight.add_(1.0)
    begin_step(version, step(num_new=3))
    assert version.number == 2


def test_a_push_of_many_pieces_and_the_sign_behind_it_are_one_change() -> None:
    model = Model()
    version = watched(model)
    for name in ("layers.0.weight", "layers.1.weight"):
        model.load_weights([(name, torch.randn(96, 64))])
    begin_step(version, signalled())
    begin_step(version, signalled())
    assert version.number == 1
    # vLLM was given weights: that they are the old ones is the trainer's affair
    model.load_weights([("layers.0.bias", model.layers[0].bias.clone())])
    begin_step(version, step())
    assert version.number == 2


def test_a_step_that_computes_nothing_ends_no_change() -> None:
    """Such a step says which requests are over; a trainer may be half way through its weights then."""
    runner = RunnerV1(Device(Cache(8)), Speculator([], OffBudget()), Metrics(()), most_requests=2)
    version = runner.weights_version
    begin_step(version, step())
    version.touch()
    runner.execute_model(SchedulerOutput.make_empty())
    assert version.computed == 0, "nothing was computed with the new weights"
    version.touch()
    begin_step(version, step())
    assert version.computed == version.number == 1, "and both pieces are one change"


def test_what_may_be_a_change_is_looked_into_once_however_often_it_was_signalled() -> None:
    looks: list[bytes] = []
    version = WeightsVersion()
    version._look = lambda: looks.append(b"first") or b"first"  # type: ignore[func-returns-value]
    begin_step(version, step())
    for _ in range(3):
        version.suspect()
        version.suspect()
        begin_step(version, signalled())
    assert version.number == 0 and len(looks) == 4


def test_weights_that_cannot_be_used_are_refused_where_the_change_ends() -> None:
    class Packed:
        def end(self) -> None:
            raise UnsupportedError("half of a head", "send it whole")

        def load(self, load_weights: Any, weights: Any) -> None:
            load_weights(weights)

    model, version = Model(), WeightsVersion()
    version.watch(model, Packed())  # type: ignore[arg-type]
    begin_step(version, step())
    model.load_weights([("layers.0.bias", model.layers[0].bias.clone())])
    with pytest.raises(UnsupportedError, match="half of a head"):
        begin_step(version, step())


@torch.no_grad()
def test_any_order_of_what_trainers_do_counts_every_change_that_a_step_computes_with_and_no_other() -> None:
    """Against a model in a line: between two steps, a change was told, or weights differ and something signalled it."""
    chance = random.Random(7)
    weights, version = [0], WeightsVersion()
    version._look = lambda: str(weights[0]).encode()
    number, seen = 0, None
    for _ in range(2000):
        is_told = is_signalled = False
        for _ in range(chance.randrange(4)):
            act = chance.choice(("touch", "write", "suspect", "nothing"))
            if act == "touch":
                version.touch()
                is_told = True
            elif act == "suspect":
                version.suspect()
                is_signalled = True
            elif act == "write":
                weights[0] = chance.randrange(3)
        assert (version.number, version.computed) == (number + is_told, number), "the next step's, and the last one's"
        is_sign = chance.random() < 0.3
        is_looked_at = is_told or is_signalled or is_sign or seen is None
        number += is_told or (is_looked_at and seen not in (None, weights[0]))
        seen = weights[0] if is_looked_at else seen
        begin_step(version, signalled() if is_sign else step())
        assert (version.number, version.computed, version.is_open) == (number, number, False)


class Base:
    """vLLM's worker, as far as it matters here."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.model_runner = SimpleNamespace(weights_version=WeightsVersion(), get_model=lambda: model)
        self.vllm_config = None
        # LoRA adapters by number; as many as `most`
        self.loaded: dict[int, str] = {}
        self.most = 2

    def add_lora(self, request: LoRARequest) -> bool:
        if request.lora_path == "/broken":
            raise ValueError("no adapter")
        if request.lora_int_id not in self.loaded or request.load_inplace:
            self.loaded[request.lora_int_id] = request.lora_path
            while len(self.loaded) > self.most:
                del self.loaded[next(iter(self.loaded))]
        return True

    def remove_lora(self, lora_id: int) -> bool:
        return self.loaded.pop(lora_id, None) is not None

    def list_loras(self) -> set[int]:
        return set(self.loaded)

    def nothing(self, tags: list[str] | None = None) -> None:
        """Is done."""

    load_model = reload_weights = update_weights = finish_weight_update = wake_up = nothing

    weights_hint = "no method"


class Extension:
    """A trainer's."""

    @torch.no_grad()
    def update_from_shared_memory(self, amount: float) -> str:
        self.model.layers[0].weight.add_(amount)
        return "done"

    @torch.no_grad()
    def refit(self) -> None:
        self.model.layers[0].weight.add_(1.0)
        raise RuntimeError("half way")

    def report_device_id(self) -> int:
        return 0


class Worker(WeightsMixin, Base, Extension):
    pass


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    monkeypatch.setattr("vllm_specrollout.worker.weights_version.PackedWeights.of", lambda model, config: None)
    one = Worker(Model())
    one.load_model()
    begin_step(one.model_runner.weights_version, step())
    return one


def changes(worker: Worker, *acts: Any) -> list[int]:
    """How many versions each act brings, with a step after it."""
    version, found = worker.model_runner.weights_version, []
    for act in acts:
        before = version.number
        act()
        begin_step(version, step())
        found.append(version.number - before)
    return found


def test_methods_that_a_trainer_calls_by_name_are_followed_by_a_look(worker: Worker) -> None:
    version = worker.model_runner.weights_version
    assert worker.update_from_shared_memory(0.0) == "done"
    begin_step(version, step())
    assert version.number == 0, "nothing was written"
    assert changes(worker, lambda: worker.update_from_shared_memory(1.0)) == [1]
    with pytest.raises(RuntimeError, match="half way"):
        worker.refit()
    begin_step(version, step())
    assert version.number == 2
    # back with the weights that it went to sleep with
    assert changes(worker, worker.wake_up, worker.reload_weights) == [0, 1]
    assert worker.weights_hint == "no method" and "report_device_id" not in vars(worker)
    # a transfer in pieces: some before a step, the last one behind it
    worker.update_weights()
    worker.update_weights()
    begin_step(version, step())
    worker.finish_weight_update()
    begin_step(version, step())
    assert version.number == 5, "what a step computed with between two pieces was a version of its own"


def test_an_adapter_that_takes_the_place_of_another_is_a_new_version(worker: Worker) -> None:
    def add(name: str, number: int, path: str = "/policy", **options: Any) -> Any:
        return lambda: worker.add_lora(LoRARequest(name, number, path, **options))

    def replace() -> None:
        worker.remove_lora(123)
        add("policy", 123)()

    # one name and one number, taken back before it comes again
    assert changes(worker, add("policy", 123), replace, replace) == [0, 1, 1]
    # loaded already: vLLM keeps it, unless it is told otherwise
    assert changes(worker, add("policy", 123), add("policy", 123, load_inplace=True)) == [0, 1]
    # one name and new numbers or paths; one number and new names
    assert changes(worker, add("policy", 124), add("policy", 125, "/step-2")) == [1, 1]
    assert changes(worker, lambda: worker.remove_lora(125), add("step 3", 125)) == [0, 1]
    with pytest.raises(ValueError):
        worker.add_lora(LoRARequest("step 3", 126, "/broken"))
    assert changes(worker, lambda: None) == [0]


def test_an_adapter_that_requests_brought_may_be_replaced_too(worker: Worker) -> None:
    worker.loaded[1] = "/policy"
    assert worker.remove_lora(1) and not worker.remove_lora(1)
    worker.add_lora(LoRARequest("policy", 1, "/policy"))
    assert worker.model_runner.weights_version.number == 1


def test_many_adapters_on_demand_change_no_version(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_version, "MOST_NAMES", 8)
    asked = [*range(1, 6), *range(1, 6), *range(1, 40)]
    names = {n: "adapter " + "i" * n for n in asked}
    acts = [lambda n=n: worker.add_lora(LoRARequest(names[n], n, f"/adapters/{n}")) for n in asked]
    acts += [lambda: worker.add_lora(LoRARequest("first loaded so", 99, "/adapters/99", load_inplace=True))]
    assert changes(worker, *acts) == [0] * len(acts)
    known = worker.model_runner.weights_version.adapters
    assert len(known._by_name) == len(known._names) == len(known._lines) == 8


def test_each_new_name_that_differs_in_digits_alone_is_a_new_version_however_it_comes(worker: Worker) -> None:
    def come(number: int, name: str) -> Any:
        return LoRARequest(name, number, f"/steps/{number}")

    def add(number: int, name: str = "policy") -> Any:
        return lambda: worker.add_lora(come(number, f"{name}-{number}"))

    # two are served while the third is trained; vLLM drops the first and loads it again for a late request
    assert changes(worker, add(17), add(18), add(19), add(17), add(19)) == [0, 1, 1, 0, 0]
    assert changes(worker, add(20, "critic"), add(21)) == [0, 1]

    def asks(one: LoRARequest | None) -> Any:
        begun = step()
        begun.scheduled_new_reqs = [SimpleNamespace(lora_request=one)]
        return lambda: begin_step(worker.model_runner.weights_version, begun)

    come_again = (come(22, "policy-22"), come(22, "policy-22"), come(21, "policy-21"), come(23, "judge"), None)
    assert changes(worker, *map(asks, come_again)) == [1, 0, 0, 0, 0]


def test_an_adapter_in_pieces_between_two_steps_is_one_version(worker: Worker) -> None:
    worker.add_lora(LoRARequest("a", 1, "/a"))
    worker.add_lora(LoRARequest("b", 2, "/b"))
    begin_step(worker.model_runner.weights_version, step())
    for number, name in enumerate("ab", start=3):
        worker.add_lora(LoRARequest(name, number, f"/{name}"))
    assert changes(worker, lambda: None) == [0] and worker.model_runner.weights_version.number == 1
