#!/usr/bin/env python3
"""Prints the size of the code as Markdown, what is largest, and circles of files and of folders.

`--compare REV` adds a column for a git revision. With `--check` the exit code is 1 if files or
folders of the work tree use each other in a circle. Sizes are a report: no value of them fails.

Product is `src` of the crates in proto, tunnel-server and tunnel-agent without the items and files
behind `cfg(test)` or the feature `test-util`. The script matches text and does not expand macros.
"""

import argparse
import io
import math
import re
import subprocess
import sys
import tarfile
import tempfile
from bisect import bisect_left
from collections import Counter
from pathlib import Path

PRODUCT = ("proto", "tunnel-server", "tunnel-agent")
TEST_FOLDERS = {"harness": "src", "scenario": "scenarios", "benchmark": "bench", "demo": "demo",
                "simulation": "scale"}
LONG_FUNCTION = 80
LARGEST = 25
CIRCLES = ("circles of files", "circles of folders")

# A comment, a string or a character. A lifetime has no closing quote and does not match.
OPAQUE = re.compile(
    r"""//[^\n]* | /\*.*?\*/ | \b[bc]?r(?P<hashes>\#*)".*?"(?P=hashes) | "(?:\\.|[^"\\])*"
    | '(?:\\(?:u\{\w+\}|x\w\w|.)|[^\\'\n])'""",
    re.S | re.X,
)
PUB = r"(?:pub(?:\([^)]*\))?\s+)?"
TEST_ITEM = re.compile(rf"(?:#\[[^\n]*\]\s*)+(?:{PUB}mod\s+(\w+)\s*(?=;))?")
USE = re.compile(rf"({PUB})\buse\s+([^;]+);")
PATH = re.compile(r"(?<![\w:])(?<!\(in )\w+(?:::\w+)+")


def blank(text):
    return re.sub(r"[^\n]", " ", text)


def blank_matches(pattern, text):
    return pattern.sub(lambda match: blank(match.group()), text)


def closing(code, start, pairs="([{)]}"):
    """Returns the index of the bracket that closes the one at `start`."""
    opening, depth = pairs[:len(pairs) // 2], 0
    for bracket in re.compile(f"[{re.escape(pairs)}]").finditer(code, start):
        depth += 1 if bracket.group() in opening else -1
        if depth == 0:
            return bracket.start()
    return len(code) - 1


def end_of_head(code, at):
    """Returns the index of the `{` or `;` after the head of an item."""
    while at < len(code) - 1 and code[at] not in ";{":
        at = closing(code, at) + 1 if code[at] in "([" else at + 1
    return at


def split_commas(code):
    """Splits at the commas outside all brackets, `<…>` included."""
    items, depth = [""], 0
    for char in re.sub(r"[-=]>", "  ", code):
        depth += (char in "([{<") - (char in ")]}>")
        if char == "," and depth == 0:
            items.append("")
        else:
            items[-1] += char
    return [" ".join(item.split()) for item in items if item.strip()]


class Source:
    """A file. In `code`, spaces replace comments, strings, characters and test items."""

    def __init__(self, root, path):
        text = path.read_text()
        self.path = path.relative_to(root).as_posix()
        parts = path.relative_to(root).with_suffix("").parts
        inside = parts[parts.index("src") + 1:] if "src" in parts else parts
        self.module = () if inside == ("lib",) else inside
        self.ends = [newline.start() for newline in re.finditer("\n", text)]
        self.lines = len(self.ends)
        self.code = blank_matches(OPAQUE, text)
        self.test_lines, self.test_modules = set(), []
        self.blank_tests(text)

    def line(self, offset):
        return bisect_left(self.ends, offset) + 1

    def blank_tests(self, text):
        for attribute in re.finditer(r"#\[cfg\(", self.code):
            start = attribute.start()
            predicate = text[start:closing(self.code, start + 1)]
            if not re.search(r'(?<!not\()\btest\b|"test-util"', predicate):
                continue
            item = TEST_ITEM.match(self.code, start)
            if item is None:  # inside a test item, which is blank already
                continue
            self.test_modules += filter(None, item.groups())
            end = end_of_head(self.code, item.end())
            end = closing(self.code, end) if self.code[end] == "{" else end
            self.test_lines.update(range(self.line(start), self.line(end) + 1))
            self.code = self.code[:start] + blank(self.code[start:end + 1]) + self.code[end + 1:]

    def functions(self):
        """Yields name, line and number of lines of each function with a body."""
        for head in re.finditer(r"\bfn\s+(\w+)\s*", self.code):
            start = head.end()
            if self.code[start] == "<":  # generics: a bound `Fn(A) -> B` contains brackets
                start = closing(self.code.replace("->", "  "), start, "<>") + 1
            end = closing(self.code, start)
            body = end_of_head(self.code, end + 1)
            if self.code[body] == "{":
                first = self.line(head.start())
                last = self.line(closing(self.code, body))
                yield head[1], first, last - first + 1


def use_leaves(tree, prefix=()):
    """Yields path and local name of each import of a `use` tree."""
    for branch in split_commas(tree):
        head, is_group, group = branch.partition("{")
        path, _, alias = head.partition(" as ")
        if path.startswith("::"):  # another crate
            continue
        segments = (*prefix, *re.findall(r"\w+|\*", path))
        if is_group:
            yield from use_leaves(group.rstrip().removesuffix("}"), segments)
        else:
            segments = segments[:-1] if segments[-1] == "self" else segments
            yield segments, alias.strip() or segments[-1]


def resolve(scopes, module, path, hops=0):
    """Returns the module that defines `path` and the segments below it, `None` for other crates.

    `scopes` maps each module to the paths of its imports by local name. A name that a module only
    imports or re-exports leads to its definition."""
    fixed = {"crate": (), "self": module, "super": module[:-1]}
    here, below = fixed.get(path[0], module), path if path[0] not in fixed else path[1:]
    for index, name in enumerate(below):
        imported = scopes[here].get(name)
        if name == "super":
            here = here[:-1]
        elif (*here, name) in scopes:
            here = (*here, name)
        elif imported and imported != path and hops < 8:
            definition = resolve(scopes, here, (*imported, *below[index + 1:]), hops + 1)
            return definition or (here, below[index:])
        else:
            return None if here == module and path == below else (here, below[index:])
    return here, ()


def references(sources):
    """Returns {(file, file): example} of the references between the files of one crate."""
    imports = {source.module: [(path, name, use)
                               for use in USE.finditer(source.code)
                               for path, name in use_leaves(use[2])] for source in sources}
    scopes = {module: {name: path for path, name, _ in leaves}
              for module, leaves in imports.items()}
    files = {source.module: source.path for source in sources}
    edges = {}
    for source in sources:
        body = blank_matches(USE, source.code)
        words = set(re.findall(r"\w+", body))
        inline = [range(head.end(), closing(body, head.end() - 1))
                  for head in re.finditer(r"\bmod\s+\w+\s*\{", body)]
        paths = [(tuple(path[0].split("::")), path.start(), False) for path in PATH.finditer(body)]
        # A re-export counts only if the file uses the name itself.
        paths += [(path, use.start(), True) for path, name, use in imports[source.module]
                  if not use[1] or name in words]
        for path, offset, is_import in sorted(paths, key=lambda entry: entry[1]):
            if path[0] == "super" and any(offset in module for module in inline):
                path = ("self", *path[1:])
            target = resolve(scopes, source.module, path)
            # An imported module counts where a path goes through it.
            if target and target[0] != source.module and (target[1] or not is_import):
                example = f"{source.path}:{source.line(offset)} {'::'.join(path)}"
                edges.setdefault((source.path, files[target[0]]), example)
    return edges


def between_folders(edges):
    """Returns {(folder, folder): example} of references between files, with `x.rs` in the folder `x`."""
    folders = {}
    for (source, target), example in edges.items():
        arc = tuple(re.match(r"(?:.*?/)?src/(\w+)", path)[1] for path in (source, target))
        if arc[0] != arc[1]:
            folders.setdefault(arc, f"{example} -> {target}")
    return folders


def find_circles(edges):
    """Returns the arcs of each strongly connected component with more than one file, or folder."""
    reach = {source: {source} for source, _ in edges}
    changed = True
    while changed:
        before = sum(map(len, reach.values()))
        for source, target in edges:
            reach[source] |= reach.get(target, set())
        changed = sum(map(len, reach.values())) > before
    groups = {frozenset(other for other in reach[node] if node in reach[other]) for node in reach}
    groups = sorted((len(group), sorted(group), group) for group in groups if len(group) > 1)
    return [{arc: edges[arc] for arc in sorted(edges) if group.issuperset(arc)}
            for _, _, group in reversed(groups)]


def product_crates(root):
    """Returns the folders of the product's crates, which may be nested."""
    return sorted(manifest.parent for folder in PRODUCT
                  for manifest in (root / folder).rglob("Cargo.toml"))


def read_sources(root, folder):
    return [Source(root, path) for path in sorted((root / folder).rglob("*.rs"))]


def spread(name, values):
    """Returns the rows of a distribution; a percentile is the value of the nearest rank."""
    values = sorted(values)
    shares = {"median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1}
    ranks = {f"{name}: {label} of lines": values[math.ceil(share * len(values)) - 1]
             for label, share in shares.items()}
    return {name: len(values), **ranks}


def measure(root):
    """Returns the rows of the table and the lists by title."""
    product, unit_tests, circles, folder_circles = [], [], [], []
    for crate in product_crates(root):
        sources = read_sources(root, crate / "src")
        test_modules = {(*source.module, name)
                        for source in sources for name in source.test_modules}
        code = [source for source in sources
                if not any(source.module[:len(test)] == test for test in test_modules)]
        product += code
        unit_tests += [source for source in sources if source not in code]
        edges = references(code)
        circles += find_circles(edges)
        folder_circles += find_circles(between_folders(edges))
    folders = {f"{name} lines (tests/{folder})":
               sum(source.lines for source in read_sources(root, f"tests/{folder}"))
               for name, folder in TEST_FOLDERS.items()}

    functions = [(f"{source.path}:{line} {name}", lines)
                 for source in product for name, line, lines in source.functions()]
    long = [f"{where}, {lines} lines" for where, lines in functions if lines > LONG_FUNCTION]
    sizes = [source.lines - len(source.test_lines) for source in product]
    unit = sum(len(source.test_lines) for source in product) + sum(s.lines for s in unit_tests)
    panics = sum(len(re.findall(r"\.unwrap\(\)|\.expect\(", source.code)) for source in product)
    rows = {
        "product lines": sum(sizes),
        "unit test lines": unit,
        **folders,
        "all tests per product line": round((unit + sum(folders.values())) / sum(sizes), 2),
        **spread("product files", sizes),
        **spread("functions", [lines for _, lines in functions]),
        f"functions above {LONG_FUNCTION} lines": len(long),
        "unwrap and expect per 1,000 product lines": round(1000 * panics / sum(sizes), 2),
        "crates": len(product_crates(root)),
        CIRCLES[0]: len(circles),
        CIRCLES[1]: len(folder_circles),
    }
    files = Counter({source.path: size for source, size in zip(product, sizes)})
    by_folder = Counter()
    for path, size in files.items():
        by_folder[path.rpartition("/")[0]] += size
    lists = {f"The {LARGEST} largest {name}, in product lines":
             [f"{where}, {lines:,}" for where, lines in sizes.most_common(LARGEST)]
             for name, sizes in (("folders", by_folder), ("files", files))}
    lists[f"Functions above {LONG_FUNCTION} lines"] = long
    for number, arcs in enumerate(circles, 1):
        files = sorted({source for source, _ in arcs})
        title = f"Circle {number} of {len(files)} files: {', '.join(files)}"
        lists[title] = [f"{example} -> {target}" for (_, target), example in arcs.items()]
    for number, arcs in enumerate(folder_circles, 1):
        names = sorted({source for source, _ in arcs})
        lists[f"Circle {number} of folders: {', '.join(names)}"] = [*arcs.values()]
    return rows, lists


def measure_revision(root, revision):
    archive = subprocess.run(["git", "-C", root, "archive", revision, *PRODUCT, "tests"],
                             check=True, stdout=subprocess.PIPE).stdout
    with tempfile.TemporaryDirectory() as folder:
        tarfile.open(fileobj=io.BytesIO(archive)).extractall(folder, filter="data")
        return measure(Path(folder))[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compare", metavar="REV", help="add a column for a git revision")
    parser.add_argument("--check", action="store_true", help="exit with 1 if there is a circle")
    args = parser.parse_args()
    root = Path(__file__).resolve().parent.parent
    rows, lists = measure(root)
    before = measure_revision(root, args.compare) if args.compare else None

    headings = ["", *([args.compare] if before else []), "work tree"]
    print(f"| {' | '.join(headings)} |\n|---|{'---:|' * (len(headings) - 1)}")
    for name, value in rows.items():
        numbers = [*([before.get(name, 0)] if before else []), value]
        cells = [f"{number:,}" if isinstance(number, int) else str(number) for number in numbers]
        print(f"| {' | '.join([name, *cells])} |")
    for title, lines in lists.items():
        print(f"\n{title}:\n" + "\n".join(f"- {line}" for line in lines or ["none"]))
    if args.check and any(rows[name] for name in CIRCLES):
        sys.exit(1)


if __name__ == "__main__":
    main()
