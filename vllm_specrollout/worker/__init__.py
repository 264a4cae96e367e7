"""The only code that knows vLLM's engine: subclasses handed over by qualified name, nothing rebound."""
