"""Trackers, found by entry point. Nothing imports them."""
