"""Hostile calls: configurations."""

from benchmarks.hostile.call import Call

CALLS: list[Call] = []
