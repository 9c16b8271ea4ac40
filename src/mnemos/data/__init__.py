"""What goes in: tasks whose batches are pure functions of their position."""
