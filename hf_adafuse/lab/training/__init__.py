"""Trains the small members that ship with the package: the demo's three, and the benchmark's pair."""
