"""Measurements of programs: seconds, bytes, FLOPs, and the rates of the machine."""
