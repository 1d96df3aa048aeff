//! The metrics of the benchmark: their names, units, direction of improvement and gates.

/// Direction in which a figure improves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Better {
    Lower,
    Higher,
}

/// A metric of the benchmark.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Metric {
    /// Key in reports.
    pub(crate) name: &'static str,
    /// Unit in tables; empty for ratios and counts.
    pub(crate) unit: &'static str,
    pub(crate) better: Better,
    /// Largest change for the worse, as a share of the older figure, that is no regression. `None`
    /// for wall times and rates, which depend on the machine.
    pub(crate) gate: Option<f64>,
}

impl Metric {
    const fn rate(name: &'static str, unit: &'static str) -> Self {
        Self {
            name,
            unit,
            better: Better::Higher,
            gate: None,
        }
    }

    const fn cost(name: &'static str, unit: &'static str) -> Self {
        Self {
            name,
            unit,
            better: Better::Lower,
            gate: Some(0.10),
        }
    }

    const fn time(name: &'static str, unit: &'static str) -> Self {
        Self {
            name,
            unit,
            better: Better::Lower,
            gate: None,
        }
    }

    const fn count(name: &'static str) -> Self {
        Self {
            name,
            unit: "",
            better: Better::Lower,
            gate: Some(0.0),
        }
    }

    const fn memory(name: &'static str, unit: &'static str) -> Self {
        Self {
            name,
            unit,
            better: Better::Lower,
            gate: Some(0.20),
        }
    }
}

pub(crate) const DOWN: Metric = Metric::rate("down", "MB/s");
pub(crate) const DOWN_CPU: Metric = Metric::cost("down, server + agent", "CPU s/GiB");
pub(crate) const DOWN_CPU_SERVER: Metric = Metric::cost("down, server", "CPU s/GiB");
pub(crate) const DOWN_CPU_AGENT: Metric = Metric::cost("down, agent", "CPU s/GiB");
pub(crate) const UP: Metric = Metric::rate("up", "MB/s");
pub(crate) const UP_CPU: Metric = Metric::cost("up, server + agent", "CPU s/GiB");
pub(crate) const MANY: Metric = Metric::rate("64 streams down", "MB/s");
pub(crate) const MANY_CPU: Metric = Metric::cost("64 streams, server + agent", "CPU s/GiB");
pub(crate) const MANY_SLOWEST: Metric = Metric::rate("slowest stream, of the mean", "");
pub(crate) const REQUESTS: Metric = Metric::rate("requests", "/s");
pub(crate) const REQUEST_CPU: Metric = Metric::cost("a request, server + agent", "CPU us");
pub(crate) const REQUEST_P50: Metric = Metric::time("request p50", "us");
pub(crate) const REQUEST_P99: Metric = Metric::time("request p99", "us");
pub(crate) const CONNECTIONS: Metric = Metric::rate("new connections", "/s");
pub(crate) const CONNECTION_CPU: Metric =
    Metric::cost("a new connection, server + agent", "CPU us");
pub(crate) const TLS_CONNECTIONS: Metric = Metric::rate("new connections with TLS", "/s");
pub(crate) const TLS_CONNECTION_CPU: Metric =
    Metric::cost("a new connection with TLS, server + agent", "CPU us");
pub(crate) const KEPT_P50: Metric = Metric::time("200/s kept alive, p50", "us");
pub(crate) const KEPT_P99: Metric = Metric::time("200/s kept alive, p99", "us");
pub(crate) const NEW_P50: Metric = Metric::time("200/s new connection each, p50", "us");
pub(crate) const NEW_P99: Metric = Metric::time("200/s new connection each, p99", "us");
pub(crate) const PLAIN_SCRAPES: Metric = Metric::rate("scrapes of 1 MiB", "/s");
pub(crate) const PLAIN_SCRAPE_CPU: Metric =
    Metric::cost("a scrape of 1 MiB, server + agent", "CPU us");
pub(crate) const PLAIN_SCRAPE_P99: Metric = Metric::time("a scrape of 1 MiB, p99", "us");
pub(crate) const GZIP_SCRAPES: Metric = Metric::rate("scrapes of 143 KB", "/s");
pub(crate) const GZIP_SCRAPE_CPU: Metric =
    Metric::cost("a scrape of 143 KB, server + agent", "CPU us");
pub(crate) const GZIP_SCRAPE_P99: Metric = Metric::time("a scrape of 143 KB, p99", "us");
pub(crate) const FAILED: Metric = Metric::count("failed");
pub(crate) const STALLED_1: Metric = Metric::time("p99 beside 1 stalled reader, of without", "");
pub(crate) const STALLED_8: Metric = Metric::time("p99 beside 8 stalled readers, of without", "");
pub(crate) const STALLED_64: Metric = Metric::time("p99 beside 64 stalled readers, of without", "");
pub(crate) const STALLED_512: Metric =
    Metric::time("p99 beside 512 stalled readers, of without", "");
pub(crate) const STALLED_MEMORY: Metric =
    Metric::memory("server and agent with the most readers", "MiB");
pub(crate) const SERVER_MEMORY: Metric = Metric::memory("server, one idle agent", "MiB");
pub(crate) const AGENT_MEMORY: Metric = Metric::memory("agent, idle", "MiB");
pub(crate) const SERVER_PRIVATE: Metric =
    Metric::memory("server, one idle agent, without program text", "MiB");
pub(crate) const AGENT_PRIVATE: Metric = Metric::memory("agent, idle, without program text", "MiB");
pub(crate) const STREAM_SERVER: Metric = Metric::memory("an idle stream, server", "KiB");
pub(crate) const STREAM_AGENT: Metric = Metric::memory("an idle stream, agent", "KiB");
pub(crate) const GIVEN_BACK: Metric =
    Metric::memory("memory 10 s after the streams, of before", "");
pub(crate) const AGENTS_100: Metric = Metric::memory("server, each of 100 agents", "KiB");
pub(crate) const AGENTS_1000: Metric = Metric::memory("server, each of 1000 agents", "KiB");
pub(crate) const AGENTS_10000: Metric = Metric::memory("server, each of 10000 agents", "KiB");
pub(crate) const AGENTS_IDLE: Metric =
    Metric::time("server, idle, each of 1000 agents", "CPU us/s");
pub(crate) const HANDSHAKE_CPU: Metric = Metric::cost("a session of 1000 agents, server", "CPU ms");
pub(crate) const BULK_BESIDE_10: Metric = Metric::cost("down beside 10 agents", "CPU s/GiB");
pub(crate) const REQUEST_BESIDE_10: Metric = Metric::cost("a request beside 10 agents", "CPU us");
pub(crate) const CONNECTION_BESIDE_10: Metric =
    Metric::cost("a new connection beside 10 agents", "CPU us");
pub(crate) const BULK_BESIDE_1000: Metric = Metric::cost("down beside 1000 agents", "CPU s/GiB");
pub(crate) const REQUEST_BESIDE_1000: Metric =
    Metric::cost("a request beside 1000 agents", "CPU us");
pub(crate) const CONNECTION_BESIDE_1000: Metric =
    Metric::cost("a new connection beside 1000 agents", "CPU us");
pub(crate) const BULK_BESIDE_10000: Metric = Metric::cost("down beside 10000 agents", "CPU s/GiB");
pub(crate) const REQUEST_BESIDE_10000: Metric =
    Metric::cost("a request beside 10000 agents", "CPU us");
pub(crate) const CONNECTION_BESIDE_10000: Metric =
    Metric::cost("a new connection beside 10000 agents", "CPU us");
pub(crate) const START: Metric = Metric::time("agent start to first reply", "ms");
pub(crate) const AFTER_TERM: Metric = Metric::time("server TERM to first reply", "ms");
pub(crate) const AFTER_KILL: Metric = Metric::time("server KILL to first reply", "ms");
pub(crate) const ALL_BACK: Metric = Metric::time("1000 agents back after KILL", "ms");
pub(crate) const AGENT_SIZE: Metric = Metric::memory("agent binary", "MB");
pub(crate) const WAN_BULK: Metric = Metric::rate("bulk", "Mbit/s");
pub(crate) const WAN_NEW: Metric = Metric::time("new connection, of a round trip", "");
pub(crate) const WAN_BESIDE_P50: Metric = Metric::time("small beside bulk, p50", "ms");
pub(crate) const WAN_BESIDE_P99: Metric = Metric::time("small beside bulk, p99", "ms");
pub(crate) const SESSIONS_LOST: Metric = Metric::count("sessions lost");

/// All metrics, in the order of reports.
pub(crate) const ALL: &[Metric] = &[
    DOWN,
    DOWN_CPU,
    DOWN_CPU_SERVER,
    DOWN_CPU_AGENT,
    UP,
    UP_CPU,
    MANY,
    MANY_CPU,
    MANY_SLOWEST,
    REQUESTS,
    REQUEST_CPU,
    REQUEST_P50,
    REQUEST_P99,
    CONNECTIONS,
    CONNECTION_CPU,
    TLS_CONNECTIONS,
    TLS_CONNECTION_CPU,
    KEPT_P50,
    KEPT_P99,
    NEW_P50,
    NEW_P99,
    PLAIN_SCRAPES,
    PLAIN_SCRAPE_CPU,
    PLAIN_SCRAPE_P99,
    GZIP_SCRAPES,
    GZIP_SCRAPE_CPU,
    GZIP_SCRAPE_P99,
    STALLED_1,
    STALLED_8,
    STALLED_64,
    STALLED_512,
    STALLED_MEMORY,
    SERVER_MEMORY,
    AGENT_MEMORY,
    SERVER_PRIVATE,
    AGENT_PRIVATE,
    STREAM_SERVER,
    STREAM_AGENT,
    GIVEN_BACK,
    AGENTS_100,
    AGENTS_1000,
    AGENTS_10000,
    AGENTS_IDLE,
    HANDSHAKE_CPU,
    BULK_BESIDE_10,
    REQUEST_BESIDE_10,
    CONNECTION_BESIDE_10,
    BULK_BESIDE_1000,
    REQUEST_BESIDE_1000,
    CONNECTION_BESIDE_1000,
    BULK_BESIDE_10000,
    REQUEST_BESIDE_10000,
    CONNECTION_BESIDE_10000,
    START,
    AFTER_TERM,
    AFTER_KILL,
    ALL_BACK,
    AGENT_SIZE,
    WAN_BULK,
    WAN_NEW,
    WAN_BESIDE_P50,
    WAN_BESIDE_P99,
    SESSIONS_LOST,
    FAILED,
];
