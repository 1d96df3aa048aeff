//! CPU time, memory and load of processes and of the machine, as the kernel reports them.

use std::fs;
use std::path::Path;
use std::time::Instant;

/// Ticks per second in `/proc/stat` (`USER_HZ`).
const TICKS: f64 = 100.0;

/// Returns the CPU seconds that the threads of a process have used, zero if the process does not
/// exist. The figure is in nanoseconds, because the ticks of `/proc/PID/stat` are as long as all
/// the work of 100 requests.
pub(crate) fn cpu_seconds(process: u32) -> f64 {
    let first = |text: String| text.split_whitespace().next()?.parse::<f64>().ok();
    let nanoseconds = thread_files(process, "schedstat").filter_map(first);
    nanoseconds.sum::<f64>() / 1e9
}

/// Returns how often the threads of a process were switched away from, voluntarily or not.
pub(crate) fn context_switches(process: u32) -> f64 {
    let names = ["voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:"];
    thread_files(process, "status")
        .flat_map(|status| names.map(|name| number(&status, name)))
        .sum()
}

fn thread_files(process: u32, name: &'static str) -> impl Iterator<Item = String> {
    let threads = fs::read_dir(format!("/proc/{process}/task"));
    let threads = threads.into_iter().flatten().flatten();
    threads.filter_map(move |thread| fs::read_to_string(thread.path().join(name)).ok())
}

/// Returns the number of open files and sockets of a process, zero if the process does not exist.
pub(crate) fn descriptors(process: u32) -> usize {
    fs::read_dir(format!("/proc/{process}/fd")).map_or(0, Iterator::count)
}

/// Returns the resident memory of a process in KiB, zero if the process does not exist.
pub(crate) fn resident_kib(process: u32) -> f64 {
    status_kib(process, "VmRSS:")
}

/// Returns the resident memory of a process without pages of files, in KiB. Programs and libraries
/// are left out, because the kernel can drop their pages.
pub(crate) fn anonymous_kib(process: u32) -> f64 {
    status_kib(process, "RssAnon:")
}

fn status_kib(process: u32, name: &str) -> f64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    number(&status, name)
}

/// Returns the number after `name` at the beginning of a line, zero if there is none.
fn number(status: &str, name: &str) -> f64 {
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    let number = line.and_then(|rest| rest.split_whitespace().next());
    number
        .and_then(|number| number.parse().ok())
        .unwrap_or_default()
}

/// Returns the load average of the last minute.
pub(crate) fn load() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let first = text.split_whitespace().next();
    first
        .and_then(|number| number.parse().ok())
        .unwrap_or_default()
}

/// Returns the number of processors of the machine.
pub(crate) fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Describes the machine in one line.
pub(crate) fn describe() -> String {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
        .map_or("unknown processor", |(_, model)| model);
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    // Leave out the suffix of the kernel's build.
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

/// Returns the CPU seconds that all processes of the machine have used so far. Time in interrupts
/// is left out: with loopback traffic the benchmark causes it, and the kernel also counts it for
/// the interrupted process.
fn machine_seconds() -> f64 {
    let stat = fs::read_to_string(Path::new("/proc/stat")).unwrap_or_default();
    let first = stat.lines().next().unwrap_or_default();
    let fields: Vec<f64> = first
        .split_whitespace()
        .skip(1)
        .filter_map(|field| field.parse().ok())
        .collect();
    // The fields user, nice, system and steal. Steal is time that other virtual machines used.
    [0, 1, 2, 7]
        .iter()
        .filter_map(|&at| fields.get(at))
        .sum::<f64>()
        / TICKS
}

/// Measurement of the CPU time of some processes and of the machine between two moments.
#[derive(Debug)]
pub(crate) struct CpuMonitor {
    began: Instant,
    ours: Vec<(u32, f64)>,
    machine: f64,
}

/// Result of a [`CpuMonitor`].
#[derive(Debug, Clone)]
pub(crate) struct CpuUsage {
    /// Wall time in seconds.
    pub(crate) wall: f64,
    /// CPU seconds by process id.
    ours: Vec<(u32, f64)>,
    /// Share of the machine that other processes used, 0 to 1.
    pub(crate) foreign: f64,
}

impl CpuMonitor {
    /// Starts the measurement of `processes` and of this process.
    pub(crate) fn begin(processes: &[u32]) -> Self {
        let all = processes.iter().copied().chain([std::process::id()]);
        Self {
            ours: all.map(|process| (process, cpu_seconds(process))).collect(),
            machine: machine_seconds(),
            began: Instant::now(),
        }
    }

    /// Returns the CPU time used since [`Self::begin`].
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
    /// Returns the CPU seconds of one process, zero for `None`.
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
        assert!(context_switches(std::process::id()) > 0.0);
        assert!(descriptors(std::process::id()) > 0);
        assert_eq!(cpu_seconds(u32::MAX), 0.0);
    }
}
