"""Training in stages, by fine-tuning jobs: for models behind an API, or on this machine."""
