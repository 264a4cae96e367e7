"""Published experiments, simulated event by event and held against the figures that their papers print."""
