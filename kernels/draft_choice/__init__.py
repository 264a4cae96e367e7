"""Which draft each request of a batch gets, of those that were made for it on the device."""
