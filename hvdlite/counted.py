"""Numbers of things in messages."""


def counted(count: int, thing: str) -> str:
    """'1 rank', '2 ranks'."""
    return f"{count} {thing}{'s' * (count != 1)}"
