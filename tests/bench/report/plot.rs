//! Plots: one SVG for each case, with a panel of bars for each metric. A thin line shows the
//! spread.

use std::fmt::Write as _;

use super::markdown::number;
use super::{Stat, Summary};
use crate::cases::CASES;
use crate::metric::ALL;

const WIDTH: f64 = 760.0;
const BARS_FROM: f64 = 170.0;
const BARS_WIDTH: f64 = 430.0;
const ROW: f64 = 20.0;
const TITLE: f64 = 30.0;

/// Returns the names of the files and their content.
pub(super) fn render(summary: &Summary) -> Vec<(String, String)> {
    let plot = |case| (format!("case-{case}.svg"), case_plot(summary, case));
    summary.cases().map(plot).collect()
}

fn case_plot(summary: &Summary, case: u8) -> String {
    let title = CASES
        .iter()
        .find(|known| known.number == case)
        .map_or("", |known| known.title);
    let mut body = String::new();
    let mut y = TITLE;
    for metric in ALL {
        let rows: Vec<(&str, Stat)> = summary
            .systems(case, metric)
            .into_iter()
            .filter_map(|system| Some((system, summary.stat(case, system, metric)?)))
            .collect();
        if rows.iter().all(|(_, stat)| stat.most == 0.0) {
            continue;
        }
        y += ROW;
        label(
            &mut body,
            10.0,
            y,
            "bold",
            &format!("{} {}", metric.name, metric.unit),
        );
        let most = rows
            .iter()
            .map(|(_, stat)| stat.most)
            .fold(f64::MIN_POSITIVE, f64::max);
        for (system, stat) in rows {
            y += ROW;
            label(&mut body, 10.0, y, "normal", system);
            let x = |value: f64| value.max(0.0) / most * BARS_WIDTH;
            let (top, middle) = (y - 12.0, y - 5.0);
            let _infallible = write!(
                body,
                "<rect x=\"{BARS_FROM}\" y=\"{top}\" width=\"{:.1}\" height=\"14\" fill=\"{}\"/>\n\
                 <line x1=\"{:.1}\" x2=\"{:.1}\" y1=\"{middle}\" y2=\"{middle}\" stroke=\"#000\"/>\n",
                x(stat.median),
                colour(system),
                BARS_FROM + x(stat.least),
                BARS_FROM + x(stat.most),
            );
            label(
                &mut body,
                BARS_FROM + BARS_WIDTH + 8.0,
                y,
                "normal",
                &number(stat.median),
            );
        }
        y += ROW / 2.0;
    }
    let height = y + ROW;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#fff\"/>\n"
    );
    label(
        &mut svg,
        10.0,
        20.0,
        "bold",
        &format!("Case {case}: {title}"),
    );
    svg + &body + "</svg>\n"
}

fn colour(system: &str) -> &'static str {
    if system.starts_with("culvert") {
        "#3b7dd8"
    } else {
        "#b8bec8"
    }
}

fn label(svg: &mut String, x: f64, y: f64, weight: &str, text: &str) {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    let _infallible = writeln!(
        svg,
        "<text x=\"{x}\" y=\"{y}\" font-weight=\"{weight}\">{text}</text>"
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::json::tests::report;

    #[test]
    fn each_case_has_a_plot_with_a_bar_for_each_system() {
        let plots = render(&Summary::of(&report()));
        let [(name, svg)] = plots.as_slice() else {
            panic!("{plots:?}")
        };
        assert_eq!(name, "case-1.svg");
        // The background, two bars of one metric and one of the other.
        assert_eq!(svg.matches("<rect").count(), 4);
        assert_eq!(svg.matches("<line").count(), 3);
    }
}
