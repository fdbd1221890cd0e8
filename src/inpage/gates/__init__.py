"""Correctness gates against a server: nothing but HTTP, cold against hit, equality and no tolerance."""
