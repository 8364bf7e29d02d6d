"""What any run needs, whatever it learns: ranks, threads, seeds, files that are whole, resuming."""
