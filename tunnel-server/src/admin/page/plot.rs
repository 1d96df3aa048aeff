//! Plots as the paths of SVG. Pure.

use std::fmt::Write as _;

/// The line and the area of a plot, for a view of [`WIDTH`] by [`HEIGHT`]. The area begins at zero.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Plot {
    pub(super) line: String,
    pub(super) area: String,
    /// The highest value.
    pub(super) peak: u64,
}

impl Plot {
    /// Plots values at equal distances, with a gap where one is unknown.
    pub(super) fn new(values: &[Option<u64>]) -> Self {
        let mut plot = Self {
            peak: values.iter().copied().flatten().max().unwrap_or(0),
            ..Self::default()
        };
        let steps = values.len().saturating_sub(1).max(1);
        let known = values.chunk_by(|one, other| one.is_some() == other.is_some());
        let mut first = 0;
        for chunk in known {
            if chunk.first().is_some_and(Option::is_some) {
                plot.add(first, steps, chunk);
            }
            first += chunk.len();
        }
        plot
    }

    fn add(&mut self, first: usize, steps: usize, chunk: &[Option<u64>]) {
        let x = |index: usize| WIDTH * index / steps;
        let mut begin = x(first);
        let mut points = String::new();
        for (index, value) in (first..).zip(chunk) {
            let command = if index == first { 'M' } else { 'L' };
            let (x, y) = (x(index), self.y(value.unwrap_or(0)));
            let _infallible = write!(points, "{command}{x} {y}");
        }
        if let [alone] = chunk {
            // One value alone is a line over the step before it.
            let (end, step) = (begin, WIDTH / steps);
            begin = end.saturating_sub(step);
            let y = self.y(alone.unwrap_or(0));
            points = format!("M{begin} {y}H{}", end.max(step));
        }
        let _infallible = write!(self.area, "{points}V{HEIGHT}H{begin}Z");
        self.line.push_str(&points);
    }

    /// Returns the vertical position of a value. Half of a unit at each edge is for the line.
    fn y(&self, value: u64) -> u128 {
        let height = HEIGHT as u128 - 2;
        HEIGHT as u128 - 1 - height * u128::from(value) / u128::from(self.peak.max(1))
    }
}

pub(super) const WIDTH: usize = 240;
pub(super) const HEIGHT: usize = 40;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_lines_above_zero_with_gaps() {
        assert_eq!(Plot::new(&[]), Plot::default());
        assert_eq!(Plot::new(&[None, None]), Plot::default());
        let plot = Plot::new(&[Some(0), Some(10), None, Some(5), Some(10)]);
        assert_eq!(plot.line, "M0 39L60 1M180 20L240 1");
        assert_eq!(plot.area, "M0 39L60 1V40H0ZM180 20L240 1V40H180Z");
        assert_eq!(plot.peak, 10);
        assert_eq!(Plot::new(&[Some(5)]).area, "M0 1H240V40H0Z");
        assert_eq!(Plot::new(&[None, Some(u64::MAX), None]).line, "M0 1H120");
    }
}
