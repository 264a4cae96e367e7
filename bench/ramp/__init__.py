"""`specrollout bench ramp`: load that changes during the run, and how every preset takes it."""
