"""What `specrollout bench` measures: a scenario is a frozen dataclass whose fields are the command's flags."""
