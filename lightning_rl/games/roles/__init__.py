"""Several policies in one run: who plays which role, what they share, and when each learns."""
