//! The formats of a page of metrics: the text format of Prometheus, and OpenMetrics for callers
//! that ask for it.

use std::fmt::{self, Write as _};

use prometheus_client::encoding::text;
use prometheus_client::registry::Registry;

/// The format of a page of metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exposition {
    /// The text format of Prometheus, version 0.0.4.
    Text,
    /// The format of OpenMetrics, version 1.0.0.
    OpenMetrics,
}

impl Exposition {
    /// Returns the format for the values of the header `Accept`. The format is OpenMetrics only if
    /// they name it and do not prefer plain text.
    pub(crate) fn negotiate<'a>(accept: impl Iterator<Item = &'a str>) -> Self {
        let (mut open_metrics, mut plain) = (0_f32, 0_f32);
        for range in accept
            .flat_map(|value| value.split(','))
            .map(MediaRange::parse)
        {
            match (range.name.to_ascii_lowercase().as_str(), range.version) {
                ("application/openmetrics-text", None | Some("1.0.0")) => {
                    open_metrics = open_metrics.max(range.quality);
                }
                ("text/plain" | "text/*" | "*/*", _) => plain = plain.max(range.quality),
                _ => {}
            }
        }
        if open_metrics > 0.0 && open_metrics >= plain {
            Self::OpenMetrics
        } else {
            Self::Text
        }
    }

    pub(crate) fn content_type(self) -> &'static str {
        match self {
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }

    /// Returns the page with all metrics of a registry.
    pub(crate) fn encode(self, registry: &Registry) -> Result<String, fmt::Error> {
        let mut page = String::new();
        text::encode(&mut page, registry)?;
        match self {
            Self::Text => plain_text(&page),
            Self::OpenMetrics => Ok(page),
        }
    }
}

/// A media range of the header `Accept` (RFC 9110, section 12.5.1).
#[derive(Debug)]
struct MediaRange<'a> {
    name: &'a str,
    version: Option<&'a str>,
    quality: f32,
}

impl<'a> MediaRange<'a> {
    fn parse(range: &'a str) -> Self {
        let mut parameters = range.split(';').map(str::trim);
        let mut parsed = Self {
            name: parameters.next().unwrap_or_default(),
            version: None,
            quality: 1.0,
        };
        for (key, value) in parameters.filter_map(|parameter| parameter.split_once('=')) {
            if key.eq_ignore_ascii_case("version") {
                parsed.version = Some(value.trim_matches('"'));
            } else if key.eq_ignore_ascii_case("q") {
                parsed.quality = value.parse().unwrap_or(0.0);
            }
        }
        parsed
    }
}

/// Returns a page in the text format of Prometheus, made from a page of OpenMetrics.
///
/// The formats differ in the lines of comments. OpenMetrics names a family without the suffix of its
/// samples, so a reader of the text format would not find the type and the help of a counter.
/// Exemplars do not occur, because no metric has any.
fn plain_text(open_metrics: &str) -> Result<String, fmt::Error> {
    let mut page = String::with_capacity(open_metrics.len());
    let mut help = None;
    for line in open_metrics.lines() {
        if let Some(described) = line.strip_prefix("# HELP ") {
            help = described.split_once(' ');
        } else if let Some((name, kind)) = line
            .strip_prefix("# TYPE ")
            .and_then(|typed| typed.split_once(' '))
        {
            let (suffix, kind) = match kind {
                "counter" => ("_total", kind),
                "info" => ("_info", "gauge"),
                "unknown" => ("", "untyped"),
                _ => ("", kind),
            };
            if let Some((_, text)) = help.take().filter(|(described, _)| *described == name) {
                writeln!(page, "# HELP {name}{suffix} {text}")?;
            }
            writeln!(page, "# TYPE {name}{suffix} {kind}")?;
        } else if !line.starts_with('#') {
            writeln!(page, "{line}")?;
        }
    }
    Ok(page)
}

#[cfg(test)]
mod tests {
    use prometheus_client::metrics::counter::Counter;
    use prometheus_client::metrics::gauge::Gauge;
    use prometheus_client::metrics::histogram::Histogram;

    use super::*;

    #[test]
    fn open_metrics_is_only_for_callers_that_ask_for_it() {
        let prometheus_2 = "application/openmetrics-text;version=1.0.0,\
                            application/openmetrics-text;version=0.0.1;q=0.75,\
                            text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        let prometheus_3 = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,\
                            application/openmetrics-text;version=0.0.1;q=0.4,\
                            text/plain;version=0.0.4;q=0.2,*/*;q=0.1";
        let (text, open_metrics) = (Exposition::Text, Exposition::OpenMetrics);
        for (accept, expected) in [
            ("", text),
            ("*/*", text),
            ("text/plain; version=0.0.4", text),
            ("application/json", text),
            (prometheus_2, open_metrics),
            (prometheus_3, open_metrics),
            ("application/openmetrics-text", open_metrics),
            (
                "Application/OpenMetrics-Text; Version=\"1.0.0\"",
                open_metrics,
            ),
            ("application/openmetrics-text;q=0", text),
            ("application/openmetrics-text;q=x", text),
            ("application/openmetrics-text;q=NaN", text),
            ("application/openmetrics-text;version=9.0.0", text),
            ("application/openmetrics-text;q=0.4,text/plain", text),
        ] {
            let format = Exposition::negotiate(std::iter::once(accept));
            assert_eq!(format, expected, "{accept:?}");
        }
        assert_eq!(Exposition::negotiate(std::iter::empty()), text);
        let two_fields = ["text/plain;q=0.5", "application/openmetrics-text"];
        assert_eq!(Exposition::negotiate(two_fields.into_iter()), open_metrics);
    }

    #[test]
    fn text_format_names_each_family_as_its_samples() {
        let mut registry = Registry::with_prefix("x");
        let counter: Counter = Counter::default();
        registry.register("requests", "Number of # HELP lines", counter);
        let gauge: Gauge = Gauge::default();
        registry.register("open", "Open", gauge);
        let histogram = Histogram::new([1.0]);
        registry.register("wait_seconds", "Time", histogram);
        let page = Exposition::Text.encode(&registry).unwrap();
        assert!(!page.contains("# EOF"), "{page}");
        for line in [
            "# HELP x_requests_total Number of # HELP lines.",
            "# TYPE x_requests_total counter",
            "x_requests_total 0",
            "# HELP x_open Open.",
            "# TYPE x_open gauge",
            "x_open 0",
            "# TYPE x_wait_seconds histogram",
            "x_wait_seconds_count 0",
        ] {
            assert!(page.lines().any(|shown| shown == line), "{line}:\n{page}");
        }
        let page = Exposition::OpenMetrics.encode(&registry).unwrap();
        assert!(page.contains("# TYPE x_requests counter\n"), "{page}");
        assert!(page.ends_with("# EOF\n"), "{page}");
    }

    #[test]
    fn other_types_have_the_nearest_type_of_the_text_format() {
        let page = "# HELP a_build About.\n# TYPE a_build info\na_build_info{v=\"1\"} 1\n\
                    # TYPE b_seconds unknown\n# UNIT b_seconds seconds\nb_seconds 2\n# EOF\n";
        let expected = "# HELP a_build_info About.\n# TYPE a_build_info gauge\n\
                        a_build_info{v=\"1\"} 1\n# TYPE b_seconds untyped\nb_seconds 2\n";
        assert_eq!(plain_text(page).unwrap(), expected);
    }
}
