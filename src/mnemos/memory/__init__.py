"""What persists across segments and steps."""
