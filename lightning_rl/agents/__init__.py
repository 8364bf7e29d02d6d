"""Agents: how one rollout comes about, in one turn or many, with tools or an environment."""
