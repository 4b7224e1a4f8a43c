"""Shards -> drafter. Never imports `extract`."""
