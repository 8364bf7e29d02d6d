"""Updates of players who take each other's learning into account."""
