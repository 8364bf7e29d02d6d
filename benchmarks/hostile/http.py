"""Hostile calls: http."""

from benchmarks.hostile.call import Call

CALLS: list[Call] = []
