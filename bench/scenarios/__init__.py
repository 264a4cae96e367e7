"""Scenarios of `specrollout bench`: each is a frozen dataclass whose fields are the command's flags."""
