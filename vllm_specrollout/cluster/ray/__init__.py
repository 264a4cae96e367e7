"""Groups of engines on Ray. Nothing else here knows Ray."""
