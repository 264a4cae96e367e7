"""`specrollout bench index`: the history index beside arctic-inference's suffix cache. No model runs."""
