#!/usr/bin/env python3
"""Converts a page of the configuration reference to a man page of section 8, on standard output.

man.py PAGE VERSION DATE, where PAGE is docs/reference/tunnel-server.md or tunnel-agent.md.
"""

import re
import sys
from pathlib import Path

OTHER = {"tunnel-server": "tunnel-agent", "tunnel-agent": "tunnel-server"}
CELLS = re.compile(r"(?<!\\)\|")
CODE = re.compile(r"`([^`]+)`")


def escape(text):
    """Returns text in which no character is a command of roff."""
    text = text.replace("\\", r"\e").replace("-", r"\-")
    return rf"\&{text}" if text.startswith((".", "'")) else text


def inline(text):
    """Converts code spans to bold, and pipes of tables to themselves."""
    pieces = CODE.split(text.replace(r"\|", "|").strip())
    spans = (rf"\fB{escape(code)}\fR" for code in pieces[1::2])
    texts = map(escape, pieces[0::2])
    merged = next(texts)
    for span, after in zip(spans, texts):
        merged += span + after
    return rf"\&{merged}" if merged.startswith((".", "'")) else merged


def term(cell):
    """Returns the first line of an entry: a flag in bold, its value in italics."""
    flag, _, value = cell.strip().strip("`").replace(r"\|", "|").partition(" ")
    return rf"\fB{escape(flag)}\fR" + (rf" \fI{escape(value)}\fR" if value else "")


def row(cells, head):
    """Converts a row of a table to an entry."""
    text = cells[-1].strip()
    if "variable" in head and cells[1].strip():
        text += f" [env: {cells[1].strip()}]"
    if head[1:2] == ["default"]:
        text += f" [default: {cells[1].strip()}]"
    return [".TP", term(cells[0]), inline(text)]


def convert(markdown):
    """Yields the lines of the man page after its NAME, for the text after the title."""
    head, is_code = None, False
    for line in markdown:
        if line.startswith("```"):
            is_code = not is_code
            yield from [".PP", ".nf", ".RS 4"] if is_code else [".RE", ".fi"]
        elif is_code:
            yield escape(line)
        elif line.startswith("## "):
            title = line.removeprefix("## ").replace("`", "")
            yield f'.SH "{escape(title)}"'
        elif line.startswith("|"):
            cells = CELLS.split(line.strip("|"))
            if head is None:
                head = [cell.strip() for cell in cells]
            elif not line.startswith("|--"):
                yield from row(cells, head)
        elif line:
            yield inline(line)
        else:
            head = None
            yield ".PP"


def page(markdown, version, date):
    """Returns the man page of a page of the reference."""
    title, generated, purpose, *after = [line for line in markdown.split("\n\n") if line]
    name = title.removeprefix("# ")
    if name not in OTHER or not generated.startswith("Generated from the code"):
        sys.exit(f"man.py: not a page of the configuration reference: {title}")
    purpose = purpose.rstrip(".")
    lines = [
        f'.TH {name.upper()} 8 "{date}" "Culvert {version}" "Culvert"',
        ".nh",
        ".ad l",
        ".SH NAME",
        rf"{escape(name)} \- {escape(purpose)}",
        ".SH SYNOPSIS",
        rf"\fB{escape(name)}\fR \fICOMMAND\fR [\fIOPTION\fR]...",
        ".SH DESCRIPTION",
        *convert("\n\n".join(after).split("\n")),
        ".SH FILES",
        *[".TP", rf"\fI/etc/culvert/{escape(name)}.yaml\fR", "The configuration of the service."],
        *[".TP", rf"\fI/var/lib/{escape(name)}\fR", "The data directory of the service."],
        '.SH "SEE ALSO"',
        rf"\fB{escape(OTHER[name])}\fR(8), \fBsystemctl\fR(1)",
    ]
    # Empty paragraphs before a heading or a list are superfluous.
    macros = (".SH", ".TP", ".PP")
    pairs = zip(lines, [*lines[1:], ""])
    lines = [line for line, after in pairs if line != ".PP" or not after.startswith(macros)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    source, version, date = sys.argv[1:]
    sys.stdout.write(page(Path(source).read_text(encoding="utf-8"), version, date))
