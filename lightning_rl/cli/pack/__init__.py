"""``lightning-rl pack`` and ``unpack``: one update of a run in a file, to make it again."""
