"""Complete example runs, each a config with its data and rewards; see `catalogue`."""
