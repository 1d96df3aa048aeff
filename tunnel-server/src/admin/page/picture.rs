//! The servers and the links between them as a picture. Pure.

/// The picture: boxes on an ellipse, and a line for each pair of servers.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Picture {
    pub(super) boxes: Vec<ServerBox>,
    pub(super) lines: Vec<Line>,
}

/// Where a server is drawn: the center of its box.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ServerBox {
    pub(super) x: f64,
    pub(super) y: f64,
}

/// A link between two servers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Line {
    pub(super) from: ServerBox,
    pub(super) to: ServerBox,
    pub(super) state: LinkState,
}

tunnel_process::named! {
    /// What is known of the link between two servers.
    pub(super) enum LinkState: label {
        Up = "up",
        Down = "down",
        /// Neither end has said.
        Unknown = "unknown",
    }
}

impl Picture {
    /// Draws `count` servers, of which the first is this one. `link` says what is known of the link
    /// between two of them. Empty for one server, and for more than a picture shows.
    pub(super) fn new(count: usize, link: impl Fn(usize, usize) -> LinkState) -> Self {
        if !(2..=SERVERS_MAX).contains(&count) {
            return Self::default();
        }
        let boxes: Vec<_> = (0..count)
            .map(|index| ServerBox::new(index, count))
            .collect();
        let mut lines = Vec::new();
        for (to, end) in boxes.iter().enumerate() {
            for (from, begin) in boxes.iter().enumerate().take(to) {
                let (from, to, state) = (*begin, *end, link(from, to));
                lines.push(Line { from, to, state });
            }
        }
        // What is missing is drawn last, above the others.
        lines.sort_by_key(|line| line.state == LinkState::Down);
        Self { boxes, lines }
    }
}

impl ServerBox {
    /// Returns the place of a server: the first one on top, or at the left of two.
    fn new(index: usize, count: usize) -> Self {
        let begin = if count == 2 { 0.5 } else { 0.25 };
        let turn = std::f64::consts::TAU * (begin - index as f64 / count as f64);
        let round = |value: f64| value.round();
        Self {
            x: round(150.0 + 100.0 * turn.cos()),
            y: round(80.0 - 54.0 * turn.sin()),
        }
    }
}

/// Servers that a picture shows.
const SERVERS_MAX: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_pair_of_servers_has_a_line_and_a_missing_one_is_on_top() {
        let picture = |count| {
            Picture::new(count, |from, to| {
                if (from, to) == (0, 1) {
                    LinkState::Down
                } else {
                    LinkState::Up
                }
            })
        };
        assert_eq!(picture(1), Picture::default());
        assert_eq!(picture(9), Picture::default());
        let three = picture(3);
        assert_eq!((three.boxes.len(), three.lines.len()), (3, 3));
        assert_eq!(three.boxes[0], ServerBox { x: 150.0, y: 26.0 });
        let last = three.lines[2];
        assert_eq!(
            (last.from, last.to, last.state),
            (three.boxes[0], three.boxes[1], LinkState::Down)
        );
        assert_eq!(
            picture(2).boxes,
            [
                ServerBox { x: 50.0, y: 80.0 },
                ServerBox { x: 250.0, y: 80.0 }
            ]
        );
        for count in 2..=8 {
            let boxes = picture(count).boxes;
            assert!(
                boxes
                    .iter()
                    .all(|at| (40.0..=260.0).contains(&at.x) && (20.0..=140.0).contains(&at.y))
            );
        }
    }
}
