"""Around the mathematics of learning: gradients, precision, schedules, a row of metrics."""
