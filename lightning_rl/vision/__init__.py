"""Pictures: read and checked, turned into a model's tokens, and into what its tokens see."""
