"""Check docstrings, comments, messages, names and docs against the writing rules of the project.

usage: python -m tests.prose [PATH...]

Print `file:line: rule: text` for each finding. Exit with 1 if there is one. Without a path, check all folders of
`FOLDERS`. Rules: `opening` (first word of a docstring), `people` (a pronoun for people in a sentence that names no
person), `phrase` (the table `PHRASES`), `name` (modules, functions, parameters, fields, variables of long
functions, tests), `sentence` and `line` (length, in docs). Text in backticks is code and is not checked.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("hangwatch", "tests", "benchmarks", "deploy", "docs", "README.md", "CHANGELOG.md", "SECURITY.md")
SUFFIXES = (".py", ".md", ".toml", ".yaml")
SKIPPED = re.compile(r"(^|/)(tests/data/|tests/unit/test_prose\.py$|__pycache__/|\.venv/)")

LONGEST_SENTENCE = 35
LONGEST_LINE = 120
LONGEST_TEST_NAME = 80
LONGEST_FUNCTION_WITH_ANY_LOCALS = 15

OPENING = re.compile(r"\W*(what|whether|who|whom|whose|of|how)\b", re.IGNORECASE)
PRONOUN = re.compile(
    r"\b(who|whom|whose|whoever|he|him|his|somebody|someone|nobody|everybody|anybody)\b(?!-)", re.IGNORECASE
)
PEOPLE = re.compile(
    r"\b(people|persons?|humans?|users?|owners?|readers?|engineers?|operators?|administrators?|authors?|developers?"
    r"|colleagues?|attackers?|maintainers?|teams?|on[ -]call)\b",
    re.IGNORECASE,
)
PHRASES = {
    r"rooms?|house|doors?": "package, module, layer, adapter, space",
    r"(?<!labels\.)beats?(?!=|:\s(?:scan|capture)\b)": "scheduled task, tick",
    r"glanc(e|es|ed|ing)": "light capture",
    r"crews?|seats?": "job membership, rank slot",
    r"odd\s+one|accus(e|es|ed|ing)|looked\s+at\s+first": "suspect, culprit, check first",
    r"votes?": "evidence",
    r"stands?\s+in|held\s+up|behind\s+its\s+call": "is in, blocked, waiting",
    r"(has|have|had)(\s+not)?\s+come|everybody\s+came": "has joined, has not joined, has arrived",
    r"(?-i:circles?)": "cycle",
    r"patience|is\s+over\s+in": "collective timeout, times out in",
    r"quiet\s+lines?|taught|learnt": "low power, learned baseline",
    r"usual\s+pauses?|paused\s+here\s+before": "known pause",
    r"(gives?|gave|given)\s+no\s+answer|(not|never)\s+come\s+back": "did not respond, timed out, overran",
    r"(the|its|their)\s+remains|remains\s+of": "crash artifacts",
    r"left\s+behind": "abandoned",
    r"says?\s+of\s+(itself|themselves)": "process arguments, environment variable",
    r"not\s+watched|beyond\s+the\s+limits": "not monitored: exceeds a limit",
    r"but\s+for": "except",
    r"no\s+more(?=\s*[.,;:)]|$)": "no longer",
    r"(?<!there\s)(is|are)\s+(?-i:none)": "say what it is, or: there is no ...",
    r"the\s+way\s+leads": "say what happens",
}
PHRASE = re.compile(
    rf"(?<![\w-])(?:{'|'.join(f'(?P<p{number}>{pattern})' for number, pattern in enumerate(PHRASES))})(?![\w-])",
    re.IGNORECASE,
)
ADVICE = {f"p{number}": advice for number, advice in enumerate(PHRASES.values())}

VAGUE = r"one|told|said|found|own|known|left|beside|here|there|them|they|who|whom|whose|somebody|nobody|asked"
VAGUE_NAME = re.compile(VAGUE)
VAGUE_KEY = re.compile(rf"^({VAGUE})\s*=", re.MULTILINE)
OLD_NAME = re.compile(
    r"\b(NotCome|EverybodyCame|Circle|first_look|quiet_line_watts|quiet_watts_ratio_of_limit|crew|seat(ed)?"
    r"|find_standing|ProcessPlace)\b"
)
"""Names that were replaced: identifiers, values of enums, keys of TOML and JSON."""
VAGUE_MODULE = re.compile(
    rf"{VAGUE}|led|stays|rest|reached|launched|dumped|watched|locked|across|left_behind|own_jobs|seen|others|misc"
    r"|(.*_)?(helpers?|utils?|manager|elsewhere)(_.*)?"
)


CODE = re.compile(r"(`+)(?!`).+?\1", re.DOTALL)
LINK_TARGET = re.compile(r"(?<=\])\([^)\s]*\)")
SENTENCE_END = re.compile(r"[.!?][*_)\"'”]*(?:\s+(?=[^a-z\s])|\s*$)|\n\s*\n")
NOT_PROSE = re.compile(r"\s*(\||#|<|\[[^\]]+\]:|!\[|---)")
LIST_ITEM = re.compile(r"\s*([-*+]|\d+\.)\s+")


class Finding(NamedTuple):
    """A place that breaks a rule. `text` quotes the place; it may end with a replacement."""

    file: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.text}"


class Passage(NamedTuple):
    """A text for human readers, and the number of its first line in the file."""

    line: int
    text: str


def _blank(match: re.Match[str]) -> str:
    """Return spaces and line ends in place of the match, so that positions in the source do not change."""
    return re.sub(r"[^\n]", "x", match[0])


def sentences(passage: Passage) -> Iterator[Passage]:
    start = 0
    ends = [match.end() for match in SENTENCE_END.finditer(passage.text)]
    for end in (*ends, len(passage.text)):
        text = passage.text[start:end]
        if text.strip():
            yield Passage(passage.line + passage.text.count("\n", 0, start), text)
        start = end


def check_passage(file: str, passage: Passage, *, has_length_limit: bool = False) -> Iterator[Finding]:
    """Apply the rules `people`, `phrase` and, for docs, `sentence`."""
    plain = Passage(passage.line, LINK_TARGET.sub("", CODE.sub(_blank, passage.text)))
    if not (has_length_limit or PRONOUN.search(plain.text) or PHRASE.search(plain.text)):
        return
    for line, text in sentences(plain):
        for pronoun in PRONOUN.finditer(text) if not PEOPLE.search(text) else ():
            number = line + text.count("\n", 0, pronoun.start())
            yield Finding(
                file, number, "people", f"{_around(text, pronoun)}: name the thing; a thing is 'it' or 'which'"
            )
        for phrase in PHRASE.finditer(text):
            number = line + text.count("\n", 0, phrase.start())
            advice = next(advice for name, advice in ADVICE.items() if phrase[name])
            yield Finding(file, number, "phrase", f"{_around(text, phrase)}: write: {advice}")
        words = len(re.findall(r"\S*\w\S*", text))
        if has_length_limit and words > LONGEST_SENTENCE:
            number = line + text.count("\n", 0, len(text) - len(text.lstrip()))
            yield Finding(file, number, "sentence", f"{words} words, at most {LONGEST_SENTENCE}: {text.split()[0]} ...")


def _around(text: str, match: re.Match[str]) -> str:
    """Return the match with the two words before and after it."""
    before, after = text[: match.start()].split()[-2:], text[match.end() :].split()[:2]
    return '"' + " ".join((*before, match[0], *after)) + '"'


def _docstrings(nodes: Iterable[ast.AST]) -> Iterator[Passage]:
    """Yield the docstrings of modules, classes, functions and attributes."""
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield Passage(node.lineno, node.value.value)


def _strings(nodes: Iterable[ast.AST]) -> Iterator[Passage]:
    """Yield the string literals with at least two words. An f-string is one text."""
    parts = set[int]()
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            parts.update(id(part) for part in node.values)
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "xx" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            text = node.value
        else:
            continue
        if " " in text.strip():
            yield Passage(node.lineno, text)


def _comments(source: str) -> Iterator[Passage]:
    """Yield the comments. Consecutive comment lines are one text."""
    first, last, lines = 0, -1, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                if lines:
                    yield Passage(first, "\n".join(lines))
                first, lines = token.start[0], []
            last = token.start[0]
            lines.append(token.string.lstrip("# "))
    if lines:
        yield Passage(first, "\n".join(lines))


def check_names(file: str, nodes: Iterable[ast.AST]) -> Iterator[Finding]:
    """Apply the rule `name`."""
    stem = Path(file).stem.removeprefix("test_").removesuffix("_child")
    if VAGUE_MODULE.fullmatch(stem):
        yield Finding(file, 1, "name", f"module {Path(file).stem}: a noun that tells what it holds")
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name == "of" or VAGUE_NAME.fullmatch(node.name):
                yield Finding(file, node.lineno, "name", f"function {node.name}: a verb phrase")
            if node.name.startswith("test_") and len(node.name) > LONGEST_TEST_NAME:
                yield Finding(file, node.lineno, "name", f"test {node.name}: {len(node.name)} characters")
            given = node.args
            for parameter in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
                if parameter and VAGUE_NAME.fullmatch(parameter.arg):
                    text = f"parameter {node.name}.{parameter.arg}: say what it holds"
                    yield Finding(file, parameter.lineno, "name", text)
        elif isinstance(node, ast.keyword) and node.arg == "labels" and isinstance(node.value, ast.Tuple):
            for label in node.value.elts:
                if isinstance(label, ast.Constant) and VAGUE_NAME.fullmatch(str(label.value)):
                    yield Finding(file, label.lineno, "name", f"label {label.value}: say what it holds")
        elif isinstance(node, ast.ClassDef):
            for field in node.body:
                name = (
                    field.target.id if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) else ""
                )
                if VAGUE_NAME.fullmatch(name):
                    yield Finding(file, field.lineno, "name", f"field {node.name}.{name}: say what it holds")


def _bound_name(node: ast.AST) -> str:
    """Return the name that a node binds; "" if it binds none."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
            return name
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            return name
    return ""


def check_locals(file: str, tree: ast.AST) -> Iterator[Finding]:
    """Apply the rule `name` to the variables of long functions."""
    if not file.startswith("hangwatch/"):
        return
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if (function.end_lineno or 0) - function.lineno < LONGEST_FUNCTION_WITH_ANY_LOCALS:
            continue
        for node in ast.walk(function):
            if VAGUE_NAME.fullmatch(name := _bound_name(node)):
                yield Finding(file, node.lineno, "name", f"variable {function.name}.{name}: say what it holds")


def check_python(file: str, source: str) -> Iterator[Finding]:
    """Check docstrings, comments, string literals and names."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    for docstring in _docstrings(nodes):
        if opening := OPENING.match(docstring.text):
            text = f'"{opening[1]}" begins a docstring: begin with a verb or a noun'
            yield Finding(file, docstring.line, "opening", text)
    yield from check_names(file, nodes)
    yield from check_locals(file, tree)
    for passage in (*_strings(nodes), *_comments(source)):
        yield from check_passage(file, passage)


def check_table(file: str, source: str) -> Iterator[Finding]:
    """Check the comments and values of a TOML or YAML file."""
    yield from _find_names(file, source, VAGUE_KEY)
    plain = re.sub(r"^(\s*)# ?", r"\1", source, flags=re.MULTILINE)
    yield from check_passage(file, Passage(1, plain))


def check_page(file: str, source: str) -> Iterator[Finding]:
    """Check a Markdown page without its code blocks. Tables and headings have no length limit."""
    lines, first = list[str](), 1
    fence = ""
    for number, line in enumerate((*source.splitlines(), ""), 1):
        mark = re.match(r"\s*(```+|~~~+)", line)
        if mark and (not fence or mark[1] == fence):
            fence = "" if fence else mark[1]
        is_prose = bool(line.strip()) and not fence and not mark and not NOT_PROSE.match(line)
        if lines and (not is_prose or LIST_ITEM.match(line)):
            yield from check_passage(file, Passage(first, "\n".join(lines)), has_length_limit=True)
            lines = []
        if is_prose:
            first = first if lines else number
            lines.append(LIST_ITEM.sub("", line, count=1) if not lines else line)
            if len(line) > LONGEST_LINE:
                yield Finding(file, number, "line", f"{len(line)} characters, at most {LONGEST_LINE}")
        elif not fence and not mark:
            yield from check_passage(file, Passage(number, line))


def _find_names(file: str, source: str, pattern: re.Pattern[str]) -> Iterator[Finding]:
    for name in pattern.finditer(source):
        yield Finding(file, source.count("\n", 0, name.start()) + 1, "name", f"{name[1]}: see docs/glossary.md")


def check(file: str, source: str) -> list[Finding]:
    """Return the findings of a file in line order. The suffix of the file selects the checks."""
    by_suffix = {".py": check_python, ".md": check_page, ".toml": check_table, ".yaml": check_table}
    is_shipped = file.startswith(("hangwatch/", "deploy/", "docs/", "README"))
    old_names = _find_names(file, source, OLD_NAME) if is_shipped else ()
    return sorted({*by_suffix[Path(file).suffix](file, source), *old_names})


def files(*paths: Path) -> Iterator[Path]:
    """Yield the files to check: the given files, and the files in the given folders."""
    for path in paths:
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (file for file in inside if file.suffix in SUFFIXES and not SKIPPED.search(file.as_posix()))


def main() -> int:
    paths = [Path(name) for name in sys.argv[1:]] or [Path(name) for name in FOLDERS]
    findings = [finding for path in files(*paths) for finding in check(path.as_posix(), path.read_text())]
    print(*findings, sep="\n", end="\n" if findings else "")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
