"""Games: several agents that learn at once, by protocols, as roles or stage by stage."""
