"""vLLM engines that draft for another engine: open continuations, cut back in place where the target goes elsewhere."""
