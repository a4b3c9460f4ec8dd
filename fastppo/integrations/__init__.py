"""The losses inside other trainers: one module a package, which it needs to be installed."""
