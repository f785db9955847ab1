r"""Answers as text: what can be said about them without any algebra.

Example:
    >>> as_integer(r"$1{,}305^\circ$"), normalise(r"\left(\dfrac12\right).")
    ('1305', '(\\frac12)')
"""

import re

_CHARACTERS = str.maketrans(
    {
        **{chr(0xFF01 + offset): chr(0x21 + offset) for offset in range(94)},  # full width
        **dict.fromkeys("−–—‐‑", "-"),
        **dict.fromkeys("\xa0\u2009\u202f\u2002\u2003\u2061\u200b", " "),
        **dict(zip("αβγδεζηθκλμνξρστφϕχψω", ["\\" + name + " " for name in (
            ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "kappa", "lambda", "mu", "nu", "xi", "rho", "sigma", "tau", "varphi", "phi", "chi", "psi", "omega"])], strict=True)),
        **dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹", [f"^{{{digit}}}" for digit in range(10)], strict=True)),
        **dict(zip("≤≥≠∈∪∩∖∅ℝℤℕℚℂ°…±∓×·⋅÷∞π⌊⌋⌈⌉⟨⟩≡½¼¾", [
            r"\le ", r"\ge ", r"\ne ", r"\in ", r"\cup ", r"\cap ", r"\setminus ", r"\emptyset ", r"\mathbb{R}",
            r"\mathbb{Z}", r"\mathbb{N}", r"\mathbb{Q}", r"\mathbb{C}", r"^\circ ", r"\ldots ", r"\pm ", r"\mp ",
            r"\times ", r"\cdot ", r"\cdot ", r"\div ", r"\infty ", r"\pi ", r"\lfloor ", r"\rfloor ", r"\lceil ",
            r"\rceil ", r"\langle ", r"\rangle ", r"\equiv ", r"\frac{1}{2}", r"\frac{1}{4}", r"\frac{3}{4}"],
            strict=True)),
    }
)  # fmt: skip
_SAME = {
    r"\\[dtc]frac": r"\\frac",
    r"\\leqs?(?:lant)?": r"\\le",
    r"\\geqs?(?:lant)?": r"\\ge",
    r"\\neq": r"\\ne",
    r"\\lt": "<",
    r"\\gt": ">",
    r"\\(?:varnothing|O)": r"\\emptyset",
    r"\\(?:lbrace)": r"\\{",
    r"\\(?:rbrace)": r"\\}",
    r"\\[lr]?vert": "|",
    r"\\mid": "|",
    r"\\colon": ":",
    r"\\(?:land|wedge)": " and ",
    r"\\(?:lor|vee)": " or ",
    r"\\(?:lbrack)": "[",
    r"\\(?:rbrack)": "]",
    r"\\(?:displaystyle|textstyle|left|right|[bB]igg?[lr]?|limits|nolimits|qquad|quad|newline)": " ",
}
_COMMANDS = [(re.compile(old + "(?![a-zA-Z])"), new) for old, new in _SAME.items()]
_GROUPING = re.compile(r"(?<=\d)(?:,\\!|\{,\}|\\,|~|\\ )(?=\d{3}(?!\d))")
_SPACING = re.compile(r"(?<!\\)\\[,;:!> ]|~")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mathsf|boldsymbol|mbox|hbox|bm)"
                   r"\s*\{([^{}]*)\}")  # fmt: skip
_OPERATOR = re.compile(r"\\operatorname\*?\s*\{\s*([a-zA-Z]+)\s*\}")
_LETTERS = {"m": "meters", "s": "seconds", "g": "grams", "h": "hours", "L": "liters", "l": "liters"}
_LETTER_UNIT = re.compile(r"(?<=[\d }])\\(?:text|mathrm|rm)\s*\{\s*([msghlL])\.?\s*\}(?=$|\s*\^)")
_DOTS = re.compile(r"\\(?:ldots|cdots|dots|dotsc|dotsb|dotsm|hdots)(?![a-zA-Z])|\.\.\.+")
_INTEGER = re.compile(r"([+-]?)(\d+|\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+)")
_GROUPED = re.compile(r"([-+]?)(\d{1,3}(?:[, ]\d{3})+)(\.\d+)?(?![\d,])")


def normalise(answer: str) -> str:
    """The same answer with spacing commands, dollars, a full stop and spelling variants of commands gone."""
    text = re.sub(r"√\s*(\d+(?:\.\d+)?|[a-zA-Z])", r"\\sqrt{\1}", answer).replace("√", r"\sqrt ")
    text = _GROUPING.sub("", text.translate(_CHARACTERS).replace(r"\$", "").replace("$", " "))
    text = re.sub(r"\\[()\[\]]", " ", _SPACING.sub(" ", text))
    for old, new in _COMMANDS:
        text = old.sub(new, text)
    text = text.replace("<=", r"\le ").replace(">=", r"\ge ").replace("!=", r"\ne ")
    text = re.sub(r"\s+", " ", _DOTS.sub(r"\\ldots ", text)).strip()
    text = re.sub(r"\s*\\ldots\s*", r" \\ldots ", text).strip()
    while (text[-1:] in ".,;" and text) or text.endswith(r"\\"):
        text = text.rstrip(".,;\\ ")
    return text


def as_integer(answer: str) -> str | None:
    """The integer that an answer is, as canonical digits, or None."""
    text = normalise(answer)
    text = re.sub(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})", "", text).strip()
    found = _INTEGER.fullmatch(text.replace("- ", "-"))
    if found is None:
        return None
    digits = found[2].replace(",", "").replace(" ", "").lstrip("0") or "0"
    return "-" + digits if found[1] == "-" and digits != "0" else digits


def join_thousands(text: str) -> str:
    """`1,234.5 cm` as `1234.5 cm`: only where the number starts the answer, so that lists and tuples are left alone."""
    found = _GROUPED.match(text)
    if found is None:
        return text
    return found[1] + re.sub("[, ]", "", found[2]) + (found[3] or "") + text[found.end() :]


def space_commas(answer: str, other: str) -> str:
    """`100,200` as `100, 200` where the other answer says that a list is meant."""
    if re.search(r",\s", other) and re.fullmatch(r"\d{1,3}(?:,\d{3})+", answer):
        return answer.replace(",", ", ")
    return answer


def unwrap_text(answer: str) -> str:
    r"""The answer with `\text{...}` and its kin replaced by their words, `\operatorname{f}` by `\f`."""
    text = _LETTER_UNIT.sub(lambda found: f" {_LETTERS[found[1]]} ", _OPERATOR.sub(r"\\\1 ", answer))
    while True:
        unwrapped = _TEXT.sub(r" \1 ", text)
        if unwrapped == text:
            return re.sub(r"\s+", " ", text).strip()
        text = unwrapped


def has_dots(answer: str) -> bool:
    """Whether part of the answer is left to the reader."""
    return r"\ldots" in answer


def spelling(answer: str) -> str:
    """One spelling for answers that differ in nothing but typesetting."""
    text = unwrap_text(normalise(answer))
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", re.sub(r"\{(\w)\}", r"\1", text).strip())


def meaning(answer: str) -> str:
    """One spelling for words: lower case where they are words and not letters, without spaces."""
    text = re.sub(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}", lambda word: word[0].lower(), unwrap_text(answer))
    return re.sub(r"(?<!\d) | (?!\d)", "", re.sub(r"\s+", " ", text).strip(" .,;"))


def split_top(text: str, separators: str) -> tuple[list[str], list[str]]:
    """The parts of a text between separators (a pattern) outside all brackets, and the separators found."""
    pattern = re.compile(separators)
    parts, found, depth, start, index = [], [], 0, 0, 0
    while index < len(text):
        if text.startswith((r"\{", r"\}"), index):
            depth += 1 if text[index + 1] == "{" else -1
            index += 2
            continue
        if text[index] in "([{":
            depth += 1
        elif text[index] in ")]}":
            depth -= 1
        elif depth == 0 and (match := pattern.match(text, index)) and match.end() > index:
            parts.append(text[start:index].strip())
            found.append(match.group().strip())
            start = index = match.end()
            continue
        index += 1
    return [*parts, text[start:].strip()], found


def split_list(answer: str) -> list[str]:
    """The values of a list: what stands between the commas outside all brackets."""
    return split_top(answer, "[,;]")[0]


def strip_braces(text: str) -> str:
    """A text without braces that hold all of it."""
    text = text.strip()
    while text.startswith("{") and text.endswith("}") and not text.endswith(r"\}"):
        depth = 0
        for index, character in enumerate(text):
            escaped = index > 0 and text[index - 1] == "\\"
            depth += 0 if escaped else {"{": 1, "}": -1}.get(character, 0)
            if depth == 0 and index < len(text) - 1:
                return text
        text = text[1:-1].strip()
    return text
