"""Protocols: who speaks when among provers and verifiers, which decisions count, and rewards."""
