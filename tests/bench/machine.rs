//! What the kernel tells of processes and of the machine: CPU time, memory, load.

use std::fs;
use std::path::Path;
use std::time::Instant;

/// Ticks of `/proc` in a second: Linux shows all times to programs in this unit (`USER_HZ`).
const TICKS: f64 = 100.0;

/// CPU seconds that a process has used, zero when it is gone.
pub(crate) fn cpu_seconds(process: u32) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // The name is in parentheses and may hold anything.
    let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks = fields.split_whitespace().skip(11).take(2);
    ticks
        .filter_map(|field| field.parse::<f64>().ok())
        .sum::<f64>()
        / TICKS
}

/// Resident memory of a process in KiB, zero when it is gone.
pub(crate) fn resident_kib(process: u32) -> f64 {
    status_kib(process, "VmRSS:")
}

/// The part of it that is no file: programs and libraries, which the kernel can drop, are left out.
pub(crate) fn private_kib(process: u32) -> f64 {
    status_kib(process, "RssAnon:")
}

fn status_kib(process: u32, name: &str) -> f64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    let number = line.and_then(|rest| rest.split_whitespace().next());
    number
        .and_then(|number| number.parse().ok())
        .unwrap_or_default()
}

/// Load average of the last minute.
pub(crate) fn load() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let first = text.split_whitespace().next();
    first
        .and_then(|number| number.parse().ok())
        .unwrap_or_default()
}

/// Processors of the machine.
pub(crate) fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// One line about the machine, for people.
pub(crate) fn describe() -> String {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
        .map_or("unknown processor", |(_, model)| model);
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    // Without the words of whoever built it.
    let kernel = kernel.split(['-', '\n']).next().unwrap_or_default();
    let control =
        fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control").unwrap_or_default();
    format!(
        "{} processors, {model}, Linux {}, TCP {}",
        processors(),
        kernel,
        control.trim()
    )
}

/// CPU seconds of all processes of the machine so far. Time in interrupts is left out: with loopback traffic it is our own,
/// and it is counted for the process that it interrupts as well.
fn machine_seconds() -> f64 {
    let stat = fs::read_to_string(Path::new("/proc/stat")).unwrap_or_default();
    let first = stat.lines().next().unwrap_or_default();
    let fields: Vec<f64> = first
        .split_whitespace()
        .skip(1)
        .filter_map(|field| field.parse().ok())
        .collect();
    // user, nice, system; steal is time that another machine took.
    [0, 1, 2, 7]
        .iter()
        .filter_map(|&at| fields.get(at))
        .sum::<f64>()
        / TICKS
}

/// CPU time of our processes and of the machine, between two moments.
#[derive(Debug)]
pub(crate) struct CpuMonitor {
    began: Instant,
    ours: Vec<(u32, f64)>,
    machine: f64,
}

/// What a [`CpuMonitor`] has seen.
#[derive(Debug, Clone)]
pub(crate) struct CpuUsage {
    /// Wall time, seconds.
    pub(crate) wall: f64,
    /// CPU seconds of each process.
    ours: Vec<(u32, f64)>,
    /// Share of the machine that others used, 0 to 1.
    pub(crate) foreign: f64,
}

impl CpuMonitor {
    /// Watches these processes, and this one.
    pub(crate) fn begin(processes: &[u32]) -> Self {
        let all = processes.iter().copied().chain([std::process::id()]);
        Self {
            ours: all.map(|process| (process, cpu_seconds(process))).collect(),
            machine: machine_seconds(),
            began: Instant::now(),
        }
    }

    /// Ends it.
    pub(crate) fn end(&self) -> CpuUsage {
        let wall = self.began.elapsed().as_secs_f64();
        let ours: Vec<_> = self
            .ours
            .iter()
            .map(|&(process, before)| (process, (cpu_seconds(process) - before).max(0.0)))
            .collect();
        let used: f64 = ours.iter().map(|(_, seconds)| seconds).sum();
        #[expect(clippy::cast_precision_loss, reason = "a few processors")]
        let whole = wall * processors() as f64;
        let foreign = (machine_seconds() - self.machine - used) / whole;
        CpuUsage {
            wall,
            ours,
            foreign: foreign.clamp(0.0, 1.0),
        }
    }
}

impl CpuUsage {
    /// CPU seconds of one process; zero without one.
    pub(crate) fn cpu(&self, process: Option<u32>) -> f64 {
        let of = |process| self.ours.iter().find(|(id, _)| *id == process);
        process.and_then(of).map_or(0.0, |(_, seconds)| *seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_work_is_not_foreign() {
        let watch = CpuMonitor::begin(&[]);
        let until = Instant::now() + std::time::Duration::from_millis(200);
        let mut sum = 0_u64;
        while Instant::now() < until {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        let usage = watch.end();
        assert!(usage.cpu(Some(std::process::id())) > 0.0);
        assert!(resident_kib(std::process::id()) > 0.0);
        assert_eq!(cpu_seconds(u32::MAX), 0.0);
    }
}
