"""What every run has, whatever it trains: options, a log, a watch, checkpoints, a report."""
