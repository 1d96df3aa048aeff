#!/usr/bin/env python3
"""Renders a report of the benchmark as tables and plots, and compares two reports.

`show` prints a report as Markdown, and writes `report.md` and a plot of each case next to the
report. `compare` prints the figures that became worse since an older report. Its exit code is 1 if
there is one, or if there is nothing to compare.

A report defines its systems, metrics, cases and targets: `tests/bench/src/report.rs` writes them.
A comparison applies the definitions of the newer report to both reports.
"""

import argparse
import json
import os
import statistics
import sys
from collections import defaultdict, namedtuple
from html import escape
from pathlib import Path

DIRECT, FLOOR, RATHOLE = "direct", "floor", "rathole"

# Units of work, and the metric that has the cost of each.
UNITS = {
    "a GiB down, CPU s": "down, server + agent",
    "a request over a kept connection, CPU us": "a request, server + agent",
    "a new connection, CPU us": "a new connection, server + agent",
    "an agent's session, server, CPU ms": "a session of 1000 agents, server",
    "an idle agent, server, KiB": "server, each of 1000 further agents, anonymous",
    "an idle stream, server, KiB": "an idle stream, server",
    "an idle stream, agent, KiB": "an idle stream, agent",
}
# Units of work, the metric that has the cost of each, and the numbers of agents that are measured.
GROWTH = {
    "a GiB down, CPU s": ("down beside {} agents", (10, 1000, 10000)),
    "a request over a kept connection, CPU us": ("a request beside {} agents", (10, 1000, 10000)),
    "a new connection, CPU us": ("a new connection beside {} agents", (10, 1000, 10000)),
    "an idle agent, server, KiB": (
        "server, each of {} further agents, anonymous", (1000, 10000)
    ),
    "idle agents, server, cores": ("server, {} idle agents", (10, 1000, 10000)),
}

# What one core carries: the metric that has the cost, and the units of work for each unit of it.
CAPACITY = {
    "GiB/s down": ("down, server + agent", 1),
    "requests/s over kept connections": ("a request, server + agent", 1e6),
    "new connections/s": ("a new connection, server + agent", 1e6),
    "idle agents (server alone)": ("server, 1000 idle agents", 1000),
}
CAPACITY_SYSTEMS = {"h2": "culvert-h2", "QUIC": "culvert-quic"}

# Median and spread of a figure that `rounds` of the `accepted` rounds of its case have.
Stat = namedtuple("Stat", "median least most rounds accepted")


class Report:
    """Figures by case, system and metric, and the rounds they are from."""

    def __init__(self, data, definitions=None):
        definitions = definitions or data
        self.data = data
        self.systems = definitions["systems"]
        self.metrics = {metric["name"]: metric for metric in definitions["metrics"]}
        self.run, self.dropped = defaultdict(set), defaultdict(set)
        self.figures = defaultdict(lambda: defaultdict(list))
        for sample in data["samples"]:
            self.run[sample["case"]].add(sample["round"])
            if sample["foreign"] > data["foreignMost"]:
                self.dropped[sample["case"]].add(sample["round"])
        for sample in data["samples"]:
            case, at, value = sample["case"], sample["round"], sample["value"]
            # A figure that is not a number is `null`.
            if at not in self.dropped[case] and value is not None:
                self.figures[case, sample["system"], sample["metric"]][at].append(value)
        self.cases = [case for case in definitions["cases"] if case["number"] in self.run]

    def is_count(self, metric):
        return self.metrics[metric]["gate"] == 0

    def values(self, case, system, metric):
        """Returns a value for each round: the sum of counts, the largest of other figures."""
        combine = sum if self.is_count(metric) else max
        rounds = self.figures.get((case, system, metric), {})
        return {at: combine(values) for at, values in rounds.items()}

    def stat(self, case, system, metric, ratio_to=None, above=None):
        """Returns the figure, divided by or minus that of another system in the same round."""
        values = self.values(case, system, metric)
        if ratio_to:
            others = self.values(case, ratio_to, metric)
            values = {at: value / others[at] for at, value in values.items() if others.get(at)}
        elif above:
            others = self.values(case, above, metric)
            values = {at: value - others[at] for at, value in values.items() if at in others}
        if not values:
            return None
        accepted = len(self.run[case]) - len(self.dropped[case])
        figures = values.values()
        median = statistics.median(figures)
        return Stat(median, min(figures), max(figures), len(figures), accepted)

    def stats(self, case, metric):
        """Returns the figure of each system that has it, in the order of reports."""
        stats = {system: self.stat(case, system, metric) for system in self.systems}
        return {system: stat for system, stat in stats.items() if stat}

    def first_stats(self, metric):
        """Returns the figure of each system, from the first case that has it."""
        stats = {}
        for case in self.cases:
            stats = self.stats(case["number"], metric) | stats
        return stats

    def targets(self):
        """Yields the targets of the cases that were run, each with its figure and verdict."""
        for case in self.cases:
            for target in case["targets"]:
                number, metric = case["number"], target["metric"]
                relation = target["ratioTo"], target["above"]
                stat = self.stat(number, target["system"], metric, *relation)
                yield number, target, stat, self.verdict(target, stat)

    def verdict(self, target, stat):
        """Returns whether the figure meets the target. Counts are judged by their worst round."""
        if not stat:
            return "not measured"
        value = stat.most if self.is_count(target["metric"]) else stat.median
        if target["atLeast"] is not None:
            return "met" if value >= target["atLeast"] else "missed"
        return "met" if value <= target["atMost"] else "missed"


def figure_text(target):
    if target["ratioTo"]:
        return f"{target['metric']} of {target['ratioTo']}"
    return target["metric"] + (f" above {target['above']}" if target["above"] else "")


def bound_text(target):
    if target["atLeast"] is not None:
        return f"at least {target['atLeast']:g}"
    return f"at most {target['atMost']:g}"


def number_text(value):
    """Formats a value with about three digits."""
    if value == 0:
        return "0"
    return f"{value:.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f}"


def stat_text(stat):
    if not stat:
        return "-"
    median, least, most = map(number_text, stat[:3])
    if stat.rounds == 1:
        return median
    some = f", {stat.rounds} of {stat.accepted} rounds" if stat.rounds < stat.accepted else ""
    return f"{median} ({least} to {most}{some})"


def table(columns, rows):
    """Returns a Markdown table. A column whose title ends in a colon is aligned to the right."""
    titles = [column.removesuffix(":") for column in columns]
    rule = ["---:" if column.endswith(":") else "---" for column in columns]
    lines = (
        "".join(f" {cell} |" if cell else " |" for cell in row)
        for row in [titles, rule, *rows]
    )
    return "\n".join(f"|{line}" for line in lines)


def render(report):
    """Returns the report as Markdown, without the title of the document."""
    data = report.data
    run, dropped = (sum(map(len, rounds.values())) for rounds in (report.run, report.dropped))
    network = "in a network namespace of its own"
    if not data["namespace"]:
        network = "on the machine's own loopback interface, without a namespace"
    blocks = [
        f"- command: `bench {data['command']}`, {data['tookSeconds']} s\n"
        f"- commit {data['commit']}, {data['when']}, binaries of the build `{data['build']}`\n"
        f"- {data['machine']}, {network}\n"
        f"- load average {data['load'][0]:g} before, {data['load'][1]:g} after\n"
        f"- {run} rounds, of which {dropped} were dropped because other processes used more than "
        f"{data['foreignMost'] * 100:.0f} % of the machine",
        "Medians, with the minimum and the maximum of all rounds in parentheses.",
        *target_tables(report),
        *unit_tables(report),
        *growth_tables(report),
    ]
    for case in report.cases:
        blocks.append(f"### Case {case['number']}: {case['title']}")
        for metric in report.metrics.values():
            blocks += figure_tables(report, case["number"], metric)
    blocks += capacity_tables(report)
    if data["errors"]:
        blocks += ["### Errors", "\n".join(f"- {error}" for error in data["errors"])]
    return "\n\n".join(blocks) + "\n"


def target_tables(report):
    rows = []
    for case, target, stat, verdict in report.targets():
        unit = "" if target["ratioTo"] else report.metrics[target["metric"]]["unit"]
        limit = f"{bound_text(target)} {unit}".rstrip()
        verdict = verdict if verdict == "met" else f"**{verdict}**"
        rows.append([case, target["system"], figure_text(target), limit, stat_text(stat), verdict])
    if not rows:
        return []
    met = sum(row[-1] == "met" for row in rows)
    columns = ["case:", "system", "figure", "target", "found:", ""]
    return [f"### Targets: {met} of {len(rows)} met", table(columns, rows)]


def unit_tables(report):
    """Returns the cost of each unit of work."""
    costs = {unit: report.first_stats(metric) for unit, metric in UNITS.items()}
    known = {system for stats in costs.values() for system in stats}
    systems = [name for name in report.systems if name in known]
    rows = [
        [unit, *(stat_text(stats.get(system)) for system in systems)]
        for unit, stats in costs.items()
    ]
    columns = ["", *(f"{system}:" for system in systems)]
    title = "### Cost of a unit: server and agent together"
    return [title, table(columns, rows)] if systems else []


def growth_tables(report):
    agents, rows = (10, 1000, 10000), []
    for case in report.cases:
        for system in report.systems:
            for unit, (metric, measured) in GROWTH.items():
                stats = [
                    report.stat(case["number"], system, metric.format(count))
                    if count in measured else None
                    for count in agents
                ]
                if any(stats):
                    rows.append([system, unit, *map(stat_text, stats)])
    columns = ["", "", *(f"{count:,}:" for count in agents)]
    title = "### Cost of a unit of work by number of connected agents"
    return [title, table(columns, rows)] if rows else []


def capacity_tables(report):
    """Returns what one core carries that server and agent share, by the medians of their costs."""
    rows = []
    for unit, (metric, units) in CAPACITY.items():
        costs = report.first_stats(metric)
        stats = [costs.get(system) for system in CAPACITY_SYSTEMS.values()]
        rows.append([
            unit, *(number_text(units / stat.median) if stat and stat.median else "-" for stat in stats)
        ])
    title = "### What one core carries"
    text = f"Server and agent together, by their CPU time on {report.data['machine']}."
    columns = ["", *(f"{name}:" for name in CAPACITY_SYSTEMS)]
    measured = any(cell != "-" for _, *cells in rows for cell in cells)
    return [title, text, table(columns, rows)] if measured else []


def figure_tables(report, case, metric):
    """Returns the table of a metric for all systems, with ratios if `direct` is one of them."""
    name, stats = metric["name"], report.stats(case, metric["name"])
    if not stats or metric["gate"] == 0 and not any(stat.most for stat in stats.values()):
        return []
    cells = {system: stat_text(stat) for system, stat in stats.items()}
    if not report.data["rathole"] and FLOOR in stats and metric["better"] == "higher":
        cells.setdefault(RATHOLE, "not measured")
    references = [DIRECT, FLOOR] if DIRECT in stats else []
    rows = []
    for system, cell in cells.items():
        ratios = [report.stat(case, system, name, ratio_to=other) for other in references]
        rows.append([system, cell, *(f"{ratio.median:.3f}" if ratio else "-" for ratio in ratios)])
    title = f"{name}, {metric['unit']}" if metric["unit"] else name
    return [table([title, ":", *(f"of {other}:" for other in references)], rows)]


def plot(report, case):
    """Returns an SVG: a panel of bars for each metric. A thin line shows the spread."""
    width, left, longest, row, y = 760, 170, 430, 20, 30
    text = '<text x="{}" y="{}" font-weight="{}">{}</text>'
    title = escape(f"Case {case['number']}: {case['title']}", quote=False)
    body = [text.format(10, 20, "bold", title)]
    for name, metric in report.metrics.items():
        stats = report.stats(case["number"], name)
        scale = max((stat.most for stat in stats.values()), default=0)
        if scale <= 0:
            continue
        y += row
        body.append(text.format(10, y, "bold", escape(f"{name} {metric['unit']}", quote=False)))
        for system, stat in stats.items():
            y += row
            median, least, most = (max(value, 0) / scale * longest for value in stat[:3])
            color = "#3b7dd8" if system.startswith("culvert") else "#b8bec8"
            body += [
                text.format(10, y, "normal", system),
                f'<rect x="{left}" y="{y - 12}" width="{median:.1f}" height="14" fill="{color}"/>',
                f'<line x1="{left + least:.1f}" x2="{left + most:.1f}" y1="{y - 5}" y2="{y - 5}"'
                ' stroke="#000"/>',
                text.format(left + longest + 8, y, "normal", number_text(stat.median)),
            ]
        y += row // 2
    size = f'width="{width}" height="{y + row}"'
    font = 'font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>\n<rect {size} fill="#fff"/>'
    return "\n".join([head, *body, "</svg>\n"])


def show(path):
    report = Report(load(path))
    text = render(report)
    (path.parent / "report.md").write_text(text)
    for case in report.cases:
        (path.parent / f"case-{case['number']}.svg").write_text(plot(report, case))
    print(f"{text}\nwritten to {path.parent}")
    return 0


def is_worse(metric, before, after):
    """Returns whether a figure became worse: its median is beyond the gate, and even its best round
    is worse than the median of the base. One bad round is noise. Counts have no noise."""
    gate = metric["gate"]
    if gate == 0:
        return after.most > before.most
    if metric["better"] == "lower":
        return after.median > before.median * (1 + gate) and after.least > before.median
    return after.median < before.median * (1 - gate) and after.most < before.median


def regressions(base, new):
    """Returns a line for each figure that became worse, and the number of compared figures. CPU
    time is compared as the ratio to the floor of the same round. Metrics without a gate, which
    depend on the machine, are left out, and so is CPU time in cases without the floor."""
    lines, compared = [], 0
    for case in new.cases:
        for name, metric in new.metrics.items():
            if metric["gate"] is None:
                continue
            other = metric["gateOf"]
            unit = f"of {other}" if other else metric["unit"]
            for system in new.systems:
                figure = case["number"], system, name, other
                before, after = base.stat(*figure), new.stat(*figure)
                if system == other or not before or not after:
                    continue
                compared += 1
                if is_worse(metric, before, after):
                    change = f"{before.median:.2f} -> {after.median:.2f} {unit}".rstrip()
                    lines.append(f"case {case['number']}, {system}, {name}: {change}")
    return lines, compared


def lost_targets(base, new):
    """Returns a line for each target that the base meets and the new report misses. The lines do
    not fail a comparison, because some targets are ratios of wall times."""
    def with_verdict(report, wanted):
        return [
            f"case {case}, {target['system']}, {figure_text(target)} {bound_text(target)}"
            for case, target, _, verdict in report.targets()
            if verdict == wanted
        ]

    met = with_verdict(base, "met")
    return [f"no longer met: {line}" for line in with_verdict(new, "missed") if line in met]


def compare(base_path, new_path):
    definitions = load(new_path)
    new = Report(definitions)
    base = Report(load(base_path, needed=("samples", "foreignMost")), definitions)
    lines, compared = regressions(base, new)
    commits = f"{new.data['commit']} against {base.data['commit']}"
    print(f"{commits}: {compared} figures compared, {len(lines)} worse")
    for line in lines + lost_targets(base, new):
        print(line)
    if not compared:
        print("nothing to compare: no case was run in both")
    return 0 if compared and not lines else 1


def load(path, needed=("samples", "foreignMost", "systems", "metrics", "cases")):
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"cannot read report {path}: {error}")
    if missing := [key for key in needed if key not in data]:
        sys.exit(f"report {path} has no {', '.join(missing)}; run the benchmark again")
    return data


def main():
    root = Path(__file__).resolve().parents[2]
    newest = root / os.environ.get("CARGO_TARGET_DIR", "target") / "bench/report.json"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    shown = verbs.add_parser("show", help="prints a report, and writes its tables and plots")
    shown.add_argument("report", type=Path, nargs="?", default=newest)
    compared = verbs.add_parser("compare", help="exits with 1 when a cost became worse")
    compared.add_argument("base", type=Path, help="older report")
    compared.add_argument("new", type=Path, nargs="?", default=newest)
    args = parser.parse_args()
    return show(args.report) if args.verb == "show" else compare(args.base, args.new)


if __name__ == "__main__":
    sys.exit(main())
