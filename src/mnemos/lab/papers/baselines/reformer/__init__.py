"""Reformer (Kitaev, Kaiser and Levskaya 2020): attention in chunks of the tokens sorted by hash."""
