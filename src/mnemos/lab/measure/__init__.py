"""Measurements of programs, each of a call that a caller makes: seconds, bytes, operations."""
