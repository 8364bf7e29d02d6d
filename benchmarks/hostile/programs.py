"""Hostile calls: programs."""

from benchmarks.hostile.call import Call

CALLS: list[Call] = []
