"""Hostile calls: staged."""

from benchmarks.hostile.call import Call

CALLS: list[Call] = []
