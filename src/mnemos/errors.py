"""The error of a wrong input, and a warning: in a file of their own, so that the command line need not load torch."""


class InputError(ValueError):
    """The user's input was wrong: one line of what was expected, what was found and what to do."""


class SkippedFile(UserWarning):
    """A path in a folder of data is no file (a named pipe, a socket or a device), and is not read."""
