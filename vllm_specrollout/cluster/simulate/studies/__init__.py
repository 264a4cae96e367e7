"""One module per study: inputs in, a `StudyReport` out. What belongs here: how a paper's experiment is set up."""
