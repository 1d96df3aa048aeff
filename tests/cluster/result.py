"""What a row measures, its goals, and the table."""

import traceback
from collections import Counter


class Result:
    """A line of the table."""

    def __init__(self, row, transport, goal):
        self.row, self.transport, self.goal = row, transport, goal
        self.calls = self.failed = self.slowest = self.away = self.lines = self.silence = None
        self.ends, self.notes, self.misses = "", [], []

    def count(self, outcomes):
        """Takes the outcomes of calls."""
        failed = [outcome for outcome in outcomes if outcome.error]
        self.calls, self.failed = len(outcomes), len(failed)
        self.slowest = max(outcome.took for outcome in outcomes)
        self.away = longest_gap(outcomes)
        for error, count in Counter(outcome.error for outcome in failed).most_common(3):
            first = min(outcome.began for outcome in failed if outcome.error == error) - outcomes[0].began
            self.notes.append(f"{count} x {error}; first after {first:.1f} s")

    def follow(self, follows, since):
        """Takes followed logs, from a time at which all ran."""
        counts = [sum(at >= since for at in follow.times) for follow in follows]
        self.lines = f"{min(counts)} to {max(counts)}"
        self.silence = max(follow.longest_silence(since) for follow in follows)
        seconds = [follow.ended - since for follow in follows]
        kinds = Counter(follow.end for follow in follows)
        self.ends = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        self.ends += f" at {min(seconds):.0f} to {max(seconds):.0f} s"

    def expect(self, is_met, what):
        if not is_met:
            self.misses.append(what)


def longest_gap(outcomes):
    """Returns the longest time between two answers, whatever calls wait at its end."""
    answered = sorted(outcome.began + outcome.took for outcome in outcomes if not outcome.error)
    edges = [outcomes[0].began] + answered + [max(outcome.began for outcome in outcomes)]
    return max(later - earlier for earlier, later in zip(edges, edges[1:]))


def run(cluster, rows, known):
    """Runs rows, prints the table, and returns the exit code."""
    results = []
    for row, measure in rows.items():
        what = measure.__doc__.split(":", 1)[1].split(".")[0]
        cluster.say(f"row {row}: {' '.join(what.split())}")
        try:
            results += measure(cluster)
        except Exception as problem:  # pylint: disable=broad-except
            # The next rows begin from an unknown state.
            traceback.print_exc()
            failed = Result(f"row {row} was not completed", "-", "completed")
            failed.expect(False, f"{type(problem).__name__}: {problem}")
            results.append(failed)
            break
    return report(results, known)


def report(results, known_rows):
    code = 0
    table = [[
        "row", "transport", "failed calls", "slowest", "lines of logs", "longest silence", "how streams ended", "result",
    ]]
    notes = []
    for result in results:
        known = next((why for row, why in known_rows.items() if f"{result.row} ".startswith(row)), None)
        verdict = "PASS"
        if result.misses:
            verdict = "FAIL, known" if known else "FAIL"
            code |= not known
        table.append([
            result.row, result.transport,
            "-" if result.calls is None else f"{result.failed} of {result.calls}",
            "-" if result.slowest is None else f"{result.slowest:.2f} s",
            result.lines or "-", "-" if result.silence is None else f"{result.silence:.1f} s",
            result.ends or "-", verdict,
        ])
        label = f"{result.row} ({result.transport})"
        missed = f"; missed: {', '.join(result.misses)}" if result.misses else ""
        notes.append(f"{label}: goal: {result.goal}{missed}")
        notes += [f"{label}: {note}" for note in result.notes]
        if known:
            notes.append(f"{label}: {known}" if result.misses else f"{label}: passes, remove it from the known rows")
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |")
        if row is table[0]:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")
    print()
    print("\n".join(notes))
    return code
