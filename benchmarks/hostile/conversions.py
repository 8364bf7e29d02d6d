"""Hostile calls: conversions."""

from benchmarks.hostile.call import Call

CALLS: list[Call] = []
