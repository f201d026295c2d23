"""From requests to tokens: schedule, run, settle."""
