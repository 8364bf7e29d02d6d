"""Updates for players that take each other's learning into account."""
