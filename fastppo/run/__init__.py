"""The parts of every run: options, records, thresholds, checkpoints and the report."""
