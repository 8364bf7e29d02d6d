"""One HTML file that shows what runs did: curves, step times, and rollouts token by token.

Nothing here imports torch or Lightning, so that ``lightning-rl view`` starts at once.
"""
