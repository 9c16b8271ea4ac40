"""What each paper claims, and what we measured."""
