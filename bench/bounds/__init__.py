"""What must not grow or stand still: memory where no problem comes back, an event loop under the worst bodies."""
