"""Packs of tiny recorded runs: sound updates, and updates with a planted fault to shrink to."""
