"""What is known of requests before they run, and in which order they do. Pure: numbers in, numbers out."""
