"""Is the installed vLLM still the one our code was written against?

Guarded: the source of every patched and assumed definition, their signatures, and that names we rebind are looked up
when they are called. Not guarded: what those definitions call in turn.
"""

import importlib
import inspect

import pytest

from vllm_specrollout import patches
from vllm_specrollout.patches import supported

PATCHES = patches.load_all(supported.installed_vllm())
EVERY = [patch for process in patches.PROCESSES for patch in patches.load(process)]


@pytest.fixture(scope="module")
def arg_utils():
    return importlib.import_module("vllm.engine.arg_utils")


@pytest.fixture(scope="module")
def loggers():
    return importlib.import_module("vllm.v1.metrics.loggers")


original = inspect.unwrap


def parameters(function):
    return list(inspect.signature(original(function)).parameters)


def test_the_installed_vllm_is_a_supported_version():
    assert supported.version_problem(supported.installed_vllm()) is None


@pytest.mark.parametrize("version", supported.table())
def test_no_definition_that_is_assumed_lacks_its_fingerprint(version):
    assert "" not in supported.table()[version]["assumed"].values()


@pytest.mark.parametrize("patch", EVERY, ids=lambda patch: patch.target)
def test_every_patch_says_why_where_and_until_when(patch):
    assert patch.why and patch.remove_when and patch.upstream.startswith("https://github.com/vllm-project/vllm/")
    assert patch.versions and set(patch.versions) <= set(supported.table())


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.target)
def test_every_patch_is_applied_once_its_module_is_imported_and_delegates(patch):
    patches.apply_all(patch.process)
    module = importlib.import_module(patch.module)
    owner, name = patches._owner(patch.target)
    assert patches.state(patch) == "applied"
    function = getattr(getattr(owner, name), "__func__", getattr(owner, name))
    assert original(function) is not function
    assert original(function).__module__ == module.__name__
    assert inspect.signature(function) == inspect.signature(original(function))


def test_signatures_are_those_the_wrappers_expect(arg_utils, loggers):
    from vllm.v1.engine.input_processor import InputProcessor

    args = arg_utils.EngineArgs
    assert parameters(args.create_engine_config) == ["self", "usage_context", "headless"]
    assert parameters(args.from_cli_args.__func__) == ["cls", "args"]
    assert parameters(args.add_cli_args) == ["parser"]
    assert inspect.signature(original(InputProcessor.process_inputs)).return_annotation.__name__ == "EngineCoreRequest"
    assert parameters(loggers.PrometheusStatLogger.__init__)[:2] == ["self", "vllm_config"]
    for cls in (args, arg_utils.AsyncEngineArgs):
        assert "spec_rollout" not in parameters(cls.__init__)


def test_the_flags_are_added_by_name_and_after_plugins_are_loaded(arg_utils):
    source = inspect.getsource(arg_utils.AsyncEngineArgs.add_cli_args)
    assert source.index("load_general_plugins()") < source.index("EngineArgs.add_cli_args(parser)")


def test_plugins_are_loaded_whenever_engine_arguments_are_made(arg_utils):
    assert "load_general_plugins()" in inspect.getsource(arg_utils.EngineArgs.__post_init__)


def test_every_front_end_has_requests_made_through_the_class():
    from vllm.v1.engine import async_llm, llm_engine
    from vllm.v1.engine.input_processor import InputProcessor

    # bound when the processor is made, after plugins are loaded
    assert "make_async(\n            self.process_inputs" in inspect.getsource(InputProcessor.__init__)
    assert "input_processor.process_inputs(" in inspect.getsource(llm_engine)
    assert "input_processor.process_inputs_async(" in inspect.getsource(async_llm)


def test_the_counters_need_no_more_than_the_number_of_positions(loggers):
    from vllm.v1.spec_decode.metrics import SpecDecodingProm

    source = inspect.getsource(SpecDecodingProm.__init__)
    assert source.count("speculative_config.") == source.count("speculative_config.num_speculative_tokens") == 1
    init = inspect.getsource(original(loggers.PrometheusStatLogger.__init__))
    assert 'labelnames = ["model_name", "engine"]' in init and "self._spec_decoding_cls(" in init
    assert "self.spec_decoding_prom.observe(" in inspect.getsource(loggers.PrometheusStatLogger.record)


def test_worker_and_scheduler_classes_are_still_taken_by_name():
    from vllm.config.scheduler import SchedulerConfig
    from vllm.v1.worker import worker_base

    assert "resolve_obj_by_qualname" in inspect.getsource(SchedulerConfig.get_scheduler_cls)
    assert "resolve_obj_by_qualname" in inspect.getsource(worker_base)
