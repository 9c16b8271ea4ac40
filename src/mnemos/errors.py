"""The error of a wrong input. It is alone in its file so that the command line can raise it without loading torch."""


class InputError(ValueError):
    """The user's input was wrong: one line of what was expected, what was found and what to do."""
