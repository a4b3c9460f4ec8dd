"""Users' code and other packages: finding, loading and calling it."""
