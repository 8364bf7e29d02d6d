"""Weight sync from the trainer to an engine: schedules and transports."""
