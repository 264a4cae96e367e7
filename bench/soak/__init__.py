"""A server under load for hours: arrivals, faults, what its processes hold, and whether its answers stay stock's."""
