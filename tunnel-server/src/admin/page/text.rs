//! Numbers and times as people read them. Pure.

use std::time::{Duration, SystemTime};

/// A time relative to that of the page.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct RelativeTime {
    /// As in `6 s ago` or `in 9 d`.
    pub(super) text: String,
    /// RFC 3339.
    pub(super) at: String,
}

impl RelativeTime {
    /// Returns a time of RFC 3339 relative to `now`, or the text as it is if it is none.
    pub(super) fn new(at: &str, now: SystemTime) -> Self {
        let text = match humantime::parse_rfc3339(at) {
            Err(_) => at.to_owned(),
            Ok(time) => match (now.duration_since(time), time.duration_since(now)) {
                (Ok(age), _) if age < NOW => "now".to_owned(),
                (Ok(age), _) => format!("{} ago", duration(age)),
                (_, Ok(left)) => format!("in {}", duration(left)),
                (Err(_), Err(_)) => "now".to_owned(),
            },
        };
        let at = at.to_owned();
        Self { text, at }
    }

    /// Returns for how long something lasts that began then, as in `for 6 s`.
    pub(super) fn lasting(at: &str, now: SystemTime) -> Self {
        let text = age(at, now).map(|age| format!("for {}", duration(age)));
        Self {
            text: text.unwrap_or_else(|| at.to_owned()),
            at: at.to_owned(),
        }
    }

    /// Returns when something was the first time that has not lasted since, as in `first 6 s ago`.
    pub(super) fn first(at: &str, now: SystemTime) -> Self {
        let text = age(at, now).map(|age| format!("first {} ago", duration(age)));
        Self {
            text: text.unwrap_or_else(|| at.to_owned()),
            at: at.to_owned(),
        }
    }
}

/// Returns how long ago a time of RFC 3339 was, if it is one. A later time was just now.
fn age(at: &str, now: SystemTime) -> Option<Duration> {
    let time = humantime::parse_rfc3339(at).ok()?;
    Some(now.duration_since(time).unwrap_or_default())
}

/// Returns a duration in the largest unit that has an integer part.
pub(super) fn duration(duration: Duration) -> String {
    match duration.as_secs() {
        seconds @ 0..60 => format!("{seconds} s"),
        seconds @ 60..3_600 => format!("{} min", seconds / 60),
        seconds @ 3_600..86_400 => format!("{} h", seconds / 3_600),
        seconds => format!("{} d", seconds / 86_400),
    }
}

/// Returns a number with commas, as in `2,981`.
pub(super) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A figure and its unit, which a card shows smaller.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Figure {
    pub(super) number: String,
    pub(super) unit: &'static str,
}

impl Figure {
    /// Returns a count, as in `1,204`.
    pub(super) fn count(count: u64) -> Self {
        let number = grouped(count);
        Self { number, unit: "" }
    }

    /// Returns what happened in each second of a minute, as in `0.7/s`.
    pub(super) fn per_second(of_a_minute: u64) -> Self {
        let number = match of_a_minute {
            0 => "0".to_owned(),
            1..600 => {
                let hundredths = of_a_minute * 100 / 60;
                let digits = if hundredths < 10 { 2 } else { 1 };
                format!("{:.digits$}", of_a_minute as f64 / 60.0)
            }
            _ => grouped(of_a_minute / 60),
        };
        Self { number, unit: "/s" }
    }

    /// Returns a throughput in the largest unit that has an integer part, as in `1.2 MB/s`.
    pub(super) fn rate(bytes_per_second: u64) -> Self {
        let units = [" B/s", " kB/s", " MB/s", " GB/s"];
        let (mut scale, mut index) = (1, 0);
        while bytes_per_second / scale >= 1_000 && index + 1 < units.len() {
            scale *= 1_000;
            index += 1;
        }
        let whole = bytes_per_second / scale;
        let number = if index == 0 || whole >= 10 {
            grouped(whole)
        } else {
            format!("{whole}.{}", bytes_per_second % scale * 10 / scale)
        };
        let unit = units.get(index).copied().unwrap_or_default();
        Self { number, unit }
    }
}

impl std::fmt::Display for Figure {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}{}", self.number, self.unit)
    }
}

/// Age below which something is said to be now.
const NOW: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_relative_in_one_unit() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        let at = |seconds| {
            humantime::format_rfc3339_seconds(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds))
                .to_string()
        };
        for (seconds, text) in [
            (1_000_000, "now"),
            (999_996, "now"),
            (999_985, "15 s ago"),
            (999_700, "5 min ago"),
            (990_000, "2 h ago"),
            (800_000, "2 d ago"),
            (1_000_059, "in 59 s"),
            (1_800_000, "in 9 d"),
        ] {
            let shown = RelativeTime::new(&at(seconds), now);
            assert_eq!((shown.text.as_str(), shown.at), (text, at(seconds)));
        }
        let lasting = [at(999_985), at(999_999), at(1_000_059)];
        let lasting = lasting.map(|at| RelativeTime::lasting(&at, now).text);
        assert_eq!(lasting, ["for 15 s", "for 1 s", "for 0 s"]);
        let first = RelativeTime::first(&at(990_000), now);
        assert_eq!(first.text, "first 2 h ago");
        assert_eq!(RelativeTime::new("<b>", now).text, "<b>");
        assert_eq!(RelativeTime::lasting("<b>", now).text, "<b>");
    }

    #[test]
    fn numbers_are_grouped_and_rates_have_two_digits() {
        for (number, text) in [
            (0, "0"),
            (999, "999"),
            (1_000, "1,000"),
            (1_234_567, "1,234,567"),
        ] {
            assert_eq!(grouped(number), text);
        }
        for (rate, text) in [
            (0, "0 B/s"),
            (999, "999 B/s"),
            (1_250, "1.2 kB/s"),
            (12_999, "12 kB/s"),
            (400_000, "400 kB/s"),
            (7_700_000, "7.7 MB/s"),
            (5_000_000_000_000, "5,000 GB/s"),
        ] {
            assert_eq!(Figure::rate(rate).to_string(), text);
        }
        for (minute, text) in [
            (0, "0/s"),
            (1, "0.02/s"),
            (42, "0.7/s"),
            (599, "10.0/s"),
            (72_240, "1,204/s"),
        ] {
            assert_eq!(Figure::per_second(minute).to_string(), text);
        }
    }
}
