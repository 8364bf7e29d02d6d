"""Protocols: who speaks when between provers and a verifier, what a decision is, what it pays."""
