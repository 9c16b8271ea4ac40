"""Recordings of spoken words: files, filter banks, and the task to transcribe them."""
