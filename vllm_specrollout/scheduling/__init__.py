"""Order of requests, and what is known of them before they run. Pure: numbers in, numbers out."""
