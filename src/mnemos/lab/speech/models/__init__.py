"""Models that transcribe recordings."""
