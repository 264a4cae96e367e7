"""Python imports this when it starts, where this folder is on its path: a trainer's processes run V2 on CPU."""

from bench.runner.interpreter import is_asked_for

if is_asked_for():
    import tests.v2.interpreter  # noqa: F401 - before vLLM is imported
