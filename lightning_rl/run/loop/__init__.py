"""The event loop in the background, and the main thread beside it: waits, threads, signals."""
