"""`specrollout bench sweep`: `auto` against stock and against every fixed draft length, over batches and accuracies."""
