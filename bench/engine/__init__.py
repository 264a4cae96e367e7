"""`specrollout bench engine`: decoding speed with drafts of known quality, against stock vLLM."""
