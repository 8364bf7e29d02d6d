"""One HTML file that shows runs: curves, step times, and rollouts token by token.

Nothing here imports torch or Lightning, so that ``lightning-rl view`` starts fast.
"""
