"""The viewer of what a memory holds: one page shows what a model wrote, read and kept. Start with `viewer`."""
