"""The hour on a GPU: a list of benchmark commands, resumed after any end. `bench/gpu/first_hour.sh --help`."""
