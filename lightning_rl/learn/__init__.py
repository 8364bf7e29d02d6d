"""What learning needs besides mathematics: gradients, precision, schedules, a row of metrics."""
