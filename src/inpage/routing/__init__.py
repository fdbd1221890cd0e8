"""Sends a session back to the replica that has its cache: a HAProxy configuration, and HAProxy itself for tests."""
