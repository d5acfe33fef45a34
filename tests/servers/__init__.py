"""Servers and databases with several processes, under load: what was acknowledged stays."""
