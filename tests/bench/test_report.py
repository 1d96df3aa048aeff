#!/usr/bin/env python3
"""Tests of `report.py` with a small report. A scenario runs them."""

import sys
import unittest
import xml.dom.minidom

sys.dont_write_bytecode = True
import report as module  # noqa: E402
from report import Report, Stat  # noqa: E402

NO_FAILURES = {
    "system": "floor", "metric": "failed", "ratioTo": None, "above": None,
    "atLeast": None, "atMost": 0.0,
}
TARGETS = [
    {"system": "floor", "metric": "down", "ratioTo": "direct", "above": None,
     "atLeast": 0.4, "atMost": None},
    NO_FAILURES,
]
GROWTH = [name.format(count) for name, counts in module.GROWTH.values() for count in counts]
CAPACITY = [metric for metric, _ in module.CAPACITY.values()]
METRICS = [
    {"name": "down", "unit": "MB/s", "better": "higher", "gate": None, "gateOf": None},
    {"name": "failed", "unit": "", "better": "lower", "gate": 0.0, "gateOf": None},
    *(
        {"name": name, "unit": "CPU s", "better": "lower", "gate": 0.1, "gateOf": "floor"}
        for name in [*module.UNITS.values(), *GROWTH, *CAPACITY]
    ),
]
COST = "down, server + agent"


def sample(system, at, metric, value, case=1):
    return {
        "case": case, "system": system, "round": at, "metric": metric, "value": value,
        "foreign": 0.1,
    }


def data(costs=(2.0, 2.0, 2.0)):
    """Returns three rounds of case 1, in which the speed of the machine differs between rounds. The
    costs are of the floor."""
    samples = []
    for at, (speed, cost) in enumerate(zip((1000.0, 2000.0, 1000.0), costs)):
        samples += [
            sample("direct", at, "down", speed),
            sample("floor", at, "down", speed / 2),
            sample("floor", at, COST, 400 / speed),
            sample("culvert-h2", at, COST, cost * 400 / speed),
        ]
    return {
        "commit": "0123456", "when": "2026-01-01T00:00:00Z", "command": "run", "build": "release",
        "machine": "a machine", "load": [0.0, 1.0], "namespace": True, "tookSeconds": 1,
        "foreignMost": 0.3, "rathole": False, "errors": ["case 1: a cable broke"],
        "systems": ["direct", "floor", "culvert-h2", "rathole"], "metrics": METRICS,
        "cases": [{"number": 1, "title": "one stream", "targets": TARGETS}], "samples": samples,
    }


class ReportTest(unittest.TestCase):
    def worse(self, after, before=(2.0, 2.0, 2.0)):
        return module.regressions(Report(data(before)), Report(data(after)))

    def test_rounds_with_much_foreign_work_are_dropped_and_counted(self):
        noisy = data()
        for one in noisy["samples"]:
            if one["round"] == 1:
                one.update(foreign=0.31, value=one["value"] * 100)
        stat = Report(noisy).stat(1, "direct", "down")
        self.assertEqual(stat, Stat(1000.0, 1000.0, 1000.0, 2, 2))
        self.assertIn("3 rounds, of which 1 were dropped", module.render(Report(noisy)))

    def test_ratios_are_of_the_same_round(self):
        report = Report(data())
        self.assertEqual(report.stat(1, "floor", "down", ratio_to="direct")[:3], (0.5, 0.5, 0.5))
        self.assertEqual(report.stat(1, "floor", "down", above="direct")[:3], (-500, -1000, -500))
        self.assertIsNone(report.stat(1, "floor", "down", ratio_to="rathole"))

    def test_a_failure_in_one_round_misses_a_target_of_none(self):
        report = Report(data())
        self.assertEqual(report.verdict(NO_FAILURES, Stat(0, 0, 1, 3, 3)), "missed")
        self.assertEqual(report.verdict(NO_FAILURES, Stat(0, 0, 0, 3, 3)), "met")
        self.assertEqual(report.verdict(NO_FAILURES, None), "not measured")

    def test_figures_that_are_missing_read_not_measured(self):
        text = module.render(Report(data()))
        self.assertIn("| rathole | not measured | - | - |", text)
        self.assertIn("| floor | 500 (500 to 1000) | 0.500 | 1.000 |", text)
        self.assertIn("| 1 | floor | failed | at most 0 | - | **not measured** |", text)
        self.assertIn("### Targets: 1 of 2 met", text)
        self.assertIn("- case 1: a cable broke", text)

    def test_costs_of_all_cases_are_in_one_table_and_growth_in_another(self):
        costs = data()
        costs["cases"] += [{"number": 9, "title": "memory", "targets": []}]
        costs["samples"] += [
            sample("culvert-h2", 0, "a request, server + agent", 29.0, 9),
            sample("culvert-h2", 0, "a request beside 1000 agents", 31.0, 9),
        ]
        text = module.render(Report(costs))
        self.assertIn("| a request over a kept connection, CPU us | - | 29.0 |", text)
        growth = "| culvert-h2 | a request over a kept connection, CPU us | - | 31.0 | - |"
        self.assertIn(growth, text)

    def test_capacity_of_a_core_is_the_inverse_of_the_cost(self):
        text = module.render(Report(data()))
        self.assertIn("by their CPU time on a machine.", text)
        self.assertIn("| GiB/s down | 1.25 | - |", text)

    def test_cost_beyond_the_gate_in_all_rounds_is_a_regression(self):
        line = f"case 1, culvert-h2, {COST}: 2.00 -> 2.25 of floor"
        self.assertEqual(self.worse((2.25, 2.25, 2.5)), ([line], 1))

    def test_one_bad_round_and_small_changes_are_none(self):
        for after in [(2.0, 1.9, 8.0), (2.15, 2.15, 2.15), (1.9, 2.5, 2.5)]:
            self.assertEqual(self.worse(after), ([], 1))

    def test_figures_of_a_slower_machine_are_none(self):
        slow = data()
        for one in slow["samples"]:
            one["value"] *= 10 if one["metric"] == COST else 0.1
        self.assertEqual(module.regressions(Report(data()), Report(slow)), ([], 1))

    def test_lost_target_is_reported(self):
        slow = data()
        for one in slow["samples"]:
            one["value"] /= 2 if one["system"] == "floor" else 1
        line = "no longer met: case 1, floor, down of direct at least 0.4"
        self.assertEqual(module.lost_targets(Report(data()), Report(slow)), [line])

    def test_report_without_definitions_can_be_the_base(self):
        base = {key: data()[key] for key in ("commit", "foreignMost", "samples")}
        base["samples"].append(sample("floor", 0, "a metric of the past", 1.0))
        base = Report(base, data())
        self.assertEqual(module.regressions(base, Report(data())), ([], 1))

    def test_case_has_a_plot_with_a_bar_for_each_figure(self):
        report = Report(data())
        svg = module.plot(report, report.cases[0])
        tags = xml.dom.minidom.parseString(svg).getElementsByTagName
        # The background, and two bars of each metric.
        self.assertEqual((len(tags("rect")), len(tags("line"))), (5, 4))


if __name__ == "__main__":
    unittest.main()
