"""Short layer names for figures."""

from collections.abc import Sequence


def shortened(names: Sequence[str]) -> list[str]:
    """Names without their common parts: host.blocks.0.attn.grc and host.blocks.1.attn.grc become blocks.0 and blocks.1.

    The word before a number stays, so that no name is a bare number. A single name is returned unchanged.
    """
    split = [name.split(".") for name in names]
    if len(set(names)) < 2:
        return list(names)
    shortest = min(map(len, split))
    front = next((i for i in range(shortest) if len({parts[i] for parts in split}) > 1), shortest - 1)
    back = next((i for i in range(shortest) if len({parts[-1 - i] for parts in split}) > 1), shortest)
    back = min(back, shortest - front - 1)
    if front and any(parts[front].isdigit() for parts in split):
        front -= 1
    return [".".join(parts[front : len(parts) - back]) for parts in split]
