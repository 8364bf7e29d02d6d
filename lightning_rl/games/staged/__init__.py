"""Training in stages, by fine-tune jobs: for models that only an API reaches, or as if so."""
