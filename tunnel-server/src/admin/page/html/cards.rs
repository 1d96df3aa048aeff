//! Figures with their history, and the bar of states. Pure.

use crate::admin::page::facts::{HistoryFacts, NodeDocument, QuarterFacts};
use crate::admin::page::plot::Plot;
use crate::admin::page::survey::NodeCounts;
use crate::admin::page::text::{Figure, grouped};
use crate::admin::page::visible::VisibleText;
use crate::admin::status::NodeState;
use crate::admin::traffic::MinutePoint;

/// A part of the bar of states.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) state: &'static str,
    pub(super) count: String,
    /// Position and width on a bar of 1,000.
    pub(super) x: u64,
    pub(super) width: u64,
}

impl Segment {
    /// Returns the states of the edge nodes, the best one first. Each has a visible width.
    pub(super) fn of(counts: &NodeCounts) -> Vec<Self> {
        let states = [
            NodeState::Live,
            NodeState::Connected,
            NodeState::Suspect,
            NodeState::Away,
            NodeState::Unknown,
            NodeState::Enrolled,
            NodeState::Revoked,
            NodeState::Pending,
        ];
        let states = states.into_iter().map(NodeState::label);
        let counted = states.filter_map(|state| Some((state, *counts.states.get(state)? as u64)));
        let counted: Vec<_> = counted.collect();
        let total: u64 = counted.iter().map(|(_, count)| count).sum();
        let spread = 1_000 - 8 * counted.len() as u64;
        let mut x = 0;
        let segments = counted.into_iter().map(|(state, count)| {
            let width = 8 + spread * count / total.max(1);
            x += width;
            Self {
                state,
                count: grouped(count),
                x: x - width,
                width,
            }
        });
        segments.collect()
    }
}

impl NodeCounts {
    /// Returns the number of nodes to which requests are sent, and of all that have or need an agent.
    pub(super) fn reachable(&self) -> (u64, u64) {
        let count = |state: NodeState| self.states.get(state.label()).copied().unwrap_or(0);
        let reachable = count(NodeState::Live) + count(NodeState::Connected);
        (reachable as u64, (reachable + self.not_live) as u64)
    }

    /// Returns what is in the bar and not in [`Self::reachable`], as in `, 1 pending not counted`.
    pub(super) fn uncounted(&self) -> String {
        let pending = self.states.get(NodeState::Pending.label());
        let text = pending.map(|count| format!(", {} pending not counted", grouped(*count as u64)));
        text.unwrap_or_default()
    }
}

/// Returns the percentage of the sessions that each transport has.
pub(super) fn transports(counts: &NodeCounts) -> Vec<(VisibleText, String)> {
    let total: usize = counts.transports.values().sum();
    let shares = counts.transports.iter().rev().take(2);
    let shares = shares.map(|(name, count)| {
        let percent = format!("{} %", (count * 100 + total / 2) / total.max(1));
        (VisibleText::new(name), percent)
    });
    shares.collect()
}

/// A figure with its history.
#[derive(Debug)]
pub(super) struct Card {
    pub(super) title: &'static str,
    pub(super) figure: Figure,
    pub(super) color: &'static str,
    pub(super) plots: Vec<CardPlot>,
}

#[derive(Debug)]
pub(super) struct CardPlot {
    pub(super) plot: Plot,
    /// What the plot shows, for people who do not see it.
    pub(super) label: String,
    /// As in `1 h · peak 2.0/s`.
    pub(super) caption: String,
}

impl CardPlot {
    pub(super) fn new(
        title: &str,
        (span, most): (&'static str, &'static str),
        values: &[Option<u64>],
        figure: impl Fn(u64) -> Figure,
    ) -> Self {
        let plot = Plot::new(values);
        let peak = match plot.peak {
            _ if values.iter().all(Option::is_none) => "not known".to_owned(),
            0 => "none".to_owned(),
            peak => format!("{most} {}", figure(peak)),
        };
        Self {
            plot,
            label: format!("{title}, last {span}, {peak}"),
            caption: format!("{span} · {peak}"),
        }
    }
}

impl Card {
    pub(super) fn of_history(history: &HistoryFacts) -> Vec<Self> {
        let last = |value: fn(&MinutePoint) -> u64| history.last_minute.as_ref().map_or(0, value);
        let (hour, day) = (&history.hour, &history.day);
        let rate = |bytes_of_a_minute: u64| Figure::rate(bytes_of_a_minute / 60);
        let card =
            |title, color, now, series: [&Vec<Option<u64>>; 2], figure: fn(u64) -> Figure| {
                let [hour, day] = series;
                Self {
                    title,
                    color,
                    figure: figure(now),
                    plots: vec![
                        CardPlot::new(title, HOUR, hour, figure),
                        CardPlot::new(title, DAY, day, figure),
                    ],
                }
            };
        vec![
            card(
                "Requests",
                "accent",
                last(|point| point.requests),
                [&hour.requests, &day.requests],
                Figure::per_second,
            ),
            card(
                "Errors",
                "away",
                last(|point| point.errors),
                [&hour.errors, &day.errors],
                Figure::per_second,
            ),
            card(
                "Sessions",
                "live",
                // Not those at the end of the last minute: a server that has just started had none.
                hour.sessions.last().copied().flatten().unwrap_or(0),
                [&hour.sessions, &day.sessions],
                Figure::count,
            ),
            card(
                "Traffic",
                "accent",
                last(|point| point.bytes_in + point.bytes_out),
                [&hour.bytes, &day.bytes],
                rate,
            ),
        ]
    }

    pub(super) fn of_node(document: &NodeDocument) -> Vec<Self> {
        let status = &document.node.status;
        let traffic = document.node.traffic.as_ref();
        let bytes = traffic.map_or(0, |traffic| {
            traffic.bytes_in_per_second + traffic.bytes_out_per_second
        });
        let errors = traffic.map_or(0, |traffic| traffic.errors_last_hour);
        let values = |value: fn(&QuarterFacts) -> u64| -> Vec<Option<u64>> {
            let quarters = document.history.iter();
            quarters
                .map(|quarter| quarter.up_percent.map(|_| value(quarter)))
                .collect()
        };
        let day =
            |title, color, figure, values: Vec<Option<u64>>, of_a_quarter: fn(u64) -> Figure| {
                Self {
                    title,
                    color,
                    figure,
                    plots: vec![CardPlot::new(title, DAY, &values, of_a_quarter)],
                }
            };
        let requests = document
            .history
            .iter()
            .rev()
            .take(4)
            .map(|quarter| quarter.requests)
            .sum();
        let mut cards = vec![
            day(
                "Traffic",
                "accent",
                Figure::rate(bytes),
                values(|quarter| quarter.bytes),
                |bytes| Figure::rate(bytes / 900),
            ),
            day(
                "Requests, 1 h",
                "accent",
                Figure::count(requests),
                values(|quarter| quarter.requests),
                Figure::count,
            ),
            day(
                "Errors, 1 h",
                "away",
                Figure::count(errors),
                values(|quarter| quarter.errors),
                Figure::count,
            ),
        ];
        let rtt = status.rtt_millis.map_or_else(
            || Figure {
                number: "-".to_owned(),
                unit: "",
            },
            |millis| Figure {
                number: grouped(millis),
                unit: " ms",
            },
        );
        cards.insert(
            0,
            Self {
                title: "Round trip",
                figure: rtt,
                color: "accent",
                plots: Vec::new(),
            },
        );
        cards
    }
}

/// The spans of the plots, and what their highest values are: those of a minute, and averages.
const HOUR: (&str, &str) = ("1 h", "peak");
const DAY: (&str, &str) = ("24 h", "highest 15 min");

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::page::facts::SeriesFacts;

    #[test]
    fn sessions_are_those_of_now_and_rates_those_of_the_last_minute() {
        let series = || SeriesFacts {
            sessions: vec![None, Some(0), Some(12)],
            requests: vec![None, Some(120), Some(6)],
            errors: vec![None, Some(0), Some(0)],
            bytes: vec![None, Some(0), Some(0)],
        };
        let history = HistoryFacts {
            last_minute: Some(MinutePoint {
                requests: 120,
                ..MinutePoint::default()
            }),
            hour: series(),
            day: series(),
        };
        let cards = Card::of_history(&history);
        let figures = cards.iter().map(|card| card.figure.to_string());
        let figures: Vec<_> = figures.collect();
        assert_eq!(figures, ["2.0/s", "0/s", "12", "0 B/s"]);
        let counts = |states: &[(&'static str, usize)]| NodeCounts {
            states: states.iter().copied().collect(),
            not_live: 1,
            ..NodeCounts::default()
        };
        let all = counts(&[("live", 13), ("away", 1), ("pending", 2)]);
        assert_eq!(all.reachable(), (13, 14));
        assert_eq!(all.uncounted(), ", 2 pending not counted");
        assert_eq!(counts(&[("live", 13)]).uncounted(), "");
        assert_eq!(cards[3].plots[1].caption, "24 h · none");
        assert_eq!(cards[2].plots[1].caption, "24 h · highest 15 min 12");
        let captions = cards.iter().map(|card| card.plots[0].caption.as_str());
        let captions: Vec<_> = captions.collect();
        assert_eq!(
            captions,
            [
                "1 h · peak 2.0/s",
                "1 h · none",
                "1 h · peak 12",
                "1 h · none"
            ]
        );
    }
}
