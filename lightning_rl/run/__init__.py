"""The parts that every run needs: ranks, threads, seeds, atomic files and resuming."""
