"""Source lines, broken where they are too long."""

WIDTH = 120


def statement(indent: str, left: str, right: str, comment: str = "") -> list[str]:
    """`left = right  # comment`, on as many lines as it needs: first the comment goes above, then a call is broken."""
    text = f"{indent}{left} = {right}"
    if comment and len(text) + 4 + len(comment) <= WIDTH:
        return [f"{text}  # {comment}"]
    above = [f"{indent}# {comment}"] if comment else []
    return [*above, *broken(text, indent)]


def broken(text: str, indent: str) -> list[str]:
    """A line; one that is too long and ends in a call has the arguments of this call one below the other."""
    if len(text) <= WIDTH or not text.endswith(")"):
        return [text]
    start = _opening(text)
    head, inner = text[: start + 1], text[start + 1 : -1]
    return [head, *(f"{indent}    {argument}," for argument in _arguments(inner)), f"{indent})"]


def signature(indent: str, head: str, arguments: list[str]) -> list[str]:
    """`head(arguments):` on one line, or with the arguments below each other."""
    text = f"{indent}{head}({', '.join(arguments)}):"
    if len(text) <= WIDTH:
        return [text]
    return [f"{indent}{head}(", *(f"{indent}    {argument}," for argument in arguments), f"{indent}):"]


def _opening(text: str) -> int:
    """The position of the bracket that the last character closes."""
    depth, quoted = 0, False
    for place in range(len(text) - 1, -1, -1):
        quoted ^= text[place] == '"'
        if quoted:
            continue
        depth += {")": 1, "]": 1, "(": -1, "[": -1}.get(text[place], 0)
        if depth == 0:
            return place
    raise AssertionError("brackets of generated code match")


def _within_lambda(text: str) -> bool:
    """Whether the text ends within the argument list of a lambda."""
    return text.strip().startswith("lambda ") and ":" not in text


def _arguments(inner: str) -> list[str]:
    """The arguments of a call. Text in quotes has no brackets and no commas that count."""
    parts, depth, start, quoted = [], 0, 0, False
    for place, character in enumerate(inner):
        quoted ^= character == '"'
        if quoted:
            continue
        depth += {")": -1, "]": -1, "(": 1, "[": 1}.get(character, 0)
        if character == "," and depth == 0 and not _within_lambda(inner[start:place]):
            parts.append(inner[start:place].strip())
            start = place + 1
    rest = inner[start:].strip()
    return [*parts, rest] if rest else parts
