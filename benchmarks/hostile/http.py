"""Hostile calls: http. An AgentServer is asked what it should not answer, and then a question."""

from benchmarks.hostile.call import Call
from benchmarks.hostile.http_bodies import CALLS as BODIES
from benchmarks.hostile.http_sockets import CALLS as SOCKETS

CALLS: list[Call] = [*BODIES, *SOCKETS]
