"""Models that draft: in the target's steps, or in processes of their own."""
