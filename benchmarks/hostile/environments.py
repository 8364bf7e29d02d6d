"""Hostile calls: environments."""

from benchmarks.hostile.call import Call

CALLS: list[Call] = []
