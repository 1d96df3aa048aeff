//! The standard metrics of a process (`process_*`), read from `/proc` at each scrape.

use std::fmt;
use std::fs;
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeGaugeValue, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use crate::host::Resources;

/// The collector that exports `process_*`, with the names of Prometheus' client libraries. A value
/// that cannot be read is left out.
#[derive(Debug)]
pub(super) struct ProcessCollector;

impl Collector for ProcessCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        let stat = StatTimes::parse(&read("/proc/self/stat"));
        let boot = boot_time(&read("/proc/stat"));
        let started = stat.zip(boot).map(|(stat, boot)| boot + stat.started);
        if let Some(stat) = stat {
            let counter = ConstCounter::new(stat.cpu.as_secs_f64());
            let metric = encoder.encode_descriptor(
                "process_cpu_seconds",
                "Processor time of the process in user and system mode",
                None,
                counter.metric_type(),
            )?;
            counter.encode(metric)?;
        }
        encode_gauge(
            &mut encoder,
            "process_start_time_seconds",
            "Unix time at which the process started",
            started.map(|started| started.as_secs_f64()),
        )?;
        encode_gauge(
            &mut encoder,
            "process_resident_memory_bytes",
            "Resident memory",
            resident_memory(&read("/proc/self/status")),
        )?;
        encode_gauge(
            &mut encoder,
            "process_open_fds",
            "Open file descriptors",
            open_descriptors(),
        )?;
        encode_gauge(
            &mut encoder,
            "process_max_fds",
            "Soft limit of open file descriptors",
            Resources::of_process().descriptors,
        )
    }
}

fn encode_gauge<N: EncodeGaugeValue>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    value: Option<N>,
) -> fmt::Result {
    let Some(value) = value else {
        return Ok(());
    };
    let gauge = ConstGauge::new(value);
    let metric = encoder.encode_descriptor(name, help, None, gauge.metric_type())?;
    gauge.encode(metric)
}

/// The times of `/proc/self/stat` in use (proc_pid_stat(5)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct StatTimes {
    /// Processor time in user and system mode.
    cpu: Duration,
    /// Time between the boot of the host and the start of the process.
    started: Duration,
}

impl StatTimes {
    fn parse(stat: &str) -> Option<Self> {
        // The second field is the program's name in parentheses, which may contain any character.
        let (_, after_name) = stat.rsplit_once(')')?;
        // The first of these fields has the number 3.
        let mut fields = after_name.split_ascii_whitespace();
        let user: u64 = fields.nth(14 - 3)?.parse().ok()?;
        let system: u64 = fields.next()?.parse().ok()?;
        let started: u64 = fields.nth(22 - 16)?.parse().ok()?;
        let time = |ticks: u64| Duration::from_millis(ticks.saturating_mul(1000 / USER_HZ));
        Some(Self {
            cpu: time(user.saturating_add(system)),
            started: time(started),
        })
    }
}

/// Returns the Unix time at which the host booted, from the content of `/proc/stat`.
fn boot_time(stat: &str) -> Option<Duration> {
    let seconds = stat.lines().find_map(|line| line.strip_prefix("btime "))?;
    seconds.trim().parse().ok().map(Duration::from_secs)
}

/// Returns the resident memory in bytes, from the content of `/proc/self/status`.
fn resident_memory(status: &str) -> Option<u64> {
    let size = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib: u64 = size?.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

fn open_descriptors() -> Option<u64> {
    // Since Linux 6.2 the size of the folder is the number of its entries.
    let count = fs::metadata(DESCRIPTORS).ok()?.len();
    if count > 0 {
        return Some(count);
    }
    // The folder itself is open while it is read.
    let entries = fs::read_dir(DESCRIPTORS).ok()?.count();
    u64::try_from(entries.saturating_sub(1)).ok()
}

/// Clock ticks per second in files below `/proc`. The kernel reports all times to programs in this
/// unit (`USER_HZ`), on every architecture that Rust's own releases for Linux support.
const USER_HZ: u64 = 100;
/// Folder with one entry for each open file of the process.
const DESCRIPTORS: &str = "/proc/self/fd";

#[cfg(test)]
mod tests {
    use std::time::{SystemTime, UNIX_EPOCH};

    use prometheus_client::registry::Registry;

    use super::*;

    #[test]
    fn times_are_read_behind_any_program_name() {
        let fields = "S 1 2 3 4 5 6 7 8 9 10 250 50 13 14 15 16 17 18 12345 20";
        for name in ["tunnel-server", "a b", ") (", ""] {
            let times = StatTimes::parse(&format!("42 ({name}) {fields}\n")).unwrap();
            assert_eq!(times.cpu, Duration::from_secs(3), "{name:?}");
            assert_eq!(times.started, Duration::from_millis(123_450), "{name:?}");
        }
        let not_a_number = format!("42 (a) {}", fields.replace("250", "x"));
        for damaged in ["", "42 (a)", "42 (a) S 1 2", &not_a_number] {
            assert_eq!(StatTimes::parse(damaged), None, "{damaged:?}");
        }
    }

    #[test]
    fn boot_time_and_memory_are_found_among_other_lines() {
        let stat = "cpu  1 2 3\nbtime 1700000000\nprocesses 5\n";
        assert_eq!(boot_time(stat), Some(Duration::from_secs(1_700_000_000)));
        assert_eq!(boot_time("cpu  1 2 3\n"), None);
        let status = "VmHWM:\t    9999 kB\nVmRSS:\t    2048 kB\nRssAnon:\t 1 kB\n";
        assert_eq!(resident_memory(status), Some(2 << 20));
        assert_eq!(resident_memory("VmRSS: many kB\n"), None);
    }

    #[test]
    fn values_of_this_process_are_plausible() {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(ProcessCollector));
        let mut page = String::new();
        prometheus_client::encoding::text::encode(&mut page, &registry).unwrap();
        let value = |name: &str| {
            let shown = page.lines().find_map(|line| line.strip_prefix(name));
            let shown = shown.unwrap_or_else(|| panic!("no {name}:\n{page}"));
            shown.trim().parse::<f64>().unwrap()
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let started = value("process_start_time_seconds");
        // Both clocks have a resolution of a second or worse.
        assert!((1e9..now.as_secs_f64() + 2.0).contains(&started), "{page}");
        assert!(value("process_cpu_seconds_total") >= 0.0);
        assert!(value("process_resident_memory_bytes") > 65536.0);
        assert!(value("process_open_fds") >= 3.0);
        assert!(value("process_max_fds") >= value("process_open_fds"));
    }
}
