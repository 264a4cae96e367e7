"""The process that takes requests: engine arguments, per-request options, metrics.

The files of `patches/frontend` rebind vLLM's names to the wrappers made here.
"""
