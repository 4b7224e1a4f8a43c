"""Caches of other projects: what reads them, and what writes samples for others."""
