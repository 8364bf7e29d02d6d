"""Hostile calls: trust."""

from benchmarks.hostile.call import Call

CALLS: list[Call] = []
