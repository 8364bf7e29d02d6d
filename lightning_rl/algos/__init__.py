"""The mathematics: advantages, losses, corrections, KL. Pure functions, thin classes on top."""
