"""What every run needs, whatever it learns: ranks, threads, seeds, atomic files and resuming."""
