"""JSON of files that may be damaged: whatever is wrong with the text is one kind of error."""

import json
from typing import Any


def parse(text: str) -> Any:
    """The value of a JSON text. Raises json.JSONDecodeError for any text that is none.

    `json.loads` itself raises RecursionError for deep nesting and a plain ValueError for a number of thousands of
    digits. Here both are JSONDecodeError, so that a reader needs one handler.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError("lists or objects that are nested too deeply", text, 0) from None
    except ValueError:
        raise json.JSONDecodeError("a number of too many digits", text, 0) from None
