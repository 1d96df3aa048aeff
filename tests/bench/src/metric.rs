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
    /// Key of the metric in reports.
    pub(crate) name: &'static str,
    /// Unit in tables; empty for ratios and counts.
    pub(crate) unit: &'static str,
    pub(crate) better: Better,
    pub(crate) gate: Gate,
}

/// Largest change for the worse, as a share of the older figure, that is no regression.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Gate {
    /// Wall times and rates have no gate, because they depend on the machine.
    Off,
    Itself(f64),
    /// The gate is for the figure divided by that of the floor in the same round.
    OfFloor(f64),
}

impl Metric {
    const fn rate(name: &'static str, unit: &'static str) -> Self {
        Self {
            name,
            unit,
            better: Better::Higher,
            gate: Gate::Off,
        }
    }

    const fn cost(name: &'static str, unit: &'static str) -> Self {
        Self {
            name,
            unit,
            better: Better::Lower,
            gate: Gate::OfFloor(0.10),
        }
    }

    const fn time(name: &'static str, unit: &'static str) -> Self {
        Self {
            name,
            unit,
            better: Better::Lower,
            gate: Gate::Off,
        }
    }

    const fn count(name: &'static str) -> Self {
        Self {
            name,
            unit: "",
            better: Better::Lower,
            gate: Gate::Itself(0.0),
        }
    }

    const fn memory(name: &'static str, unit: &'static str) -> Self {
        Self {
            name,
            unit,
            better: Better::Lower,
            gate: Gate::Itself(0.20),
        }
    }
}

/// Declares the metrics, in the order of reports.
macro_rules! metrics {
    ($($name:ident = $kind:ident($($text:literal),+);)+) => {
        $(pub(crate) const $name: Metric = Metric::$kind($($text),+);)+

        /// All metrics, in the order of reports.
        pub(crate) const ALL: &[Metric] = &[$($name),+];
    };
}

metrics! {
    DOWN = rate("down", "MB/s");
    DOWN_CPU = cost("down, server + agent", "CPU s/GiB");
    DOWN_CPU_SERVER = cost("down, server", "CPU s/GiB");
    DOWN_CPU_AGENT = cost("down, agent", "CPU s/GiB");
    UP = rate("up", "MB/s");
    UP_CPU = cost("up, server + agent", "CPU s/GiB");
    MANY = rate("64 streams down", "MB/s");
    MANY_CPU = cost("64 streams, server + agent", "CPU s/GiB");
    MANY_CPU_OF_ONE = time("64 streams, CPU of one stream", "");
    MANY_SLOWEST = rate("slowest stream, of the mean", "");
    REQUESTS = rate("requests", "/s");
    REQUEST_CPU = cost("a request, server + agent", "CPU us");
    REQUEST_P50 = time("request p50", "us");
    REQUEST_P99 = time("request p99", "us");
    CONNECTIONS = rate("new connections", "/s");
    CONNECTION_CPU = cost("a new connection, server + agent", "CPU us");
    TLS_CONNECTIONS = rate("new connections with TLS", "/s");
    TLS_CONNECTION_CPU = cost("a new connection with TLS, server + agent", "CPU us");
    KEPT_P50 = time("200/s kept alive, p50", "us");
    KEPT_P99 = time("200/s kept alive, p99", "us");
    KEPT_CPU = cost("200/s kept alive, server + agent", "CPU us");
    KEPT_SWITCHES = time("200/s kept alive, context switches a request, server", "");
    NEW_P50 = time("200/s new connection each, p50", "us");
    NEW_P99 = time("200/s new connection each, p99", "us");
    PLAIN_SCRAPES = rate("scrapes of 1 MiB", "/s");
    PLAIN_SCRAPE_CPU = cost("a scrape of 1 MiB, server + agent", "CPU us");
    PLAIN_SCRAPE_P99 = time("a scrape of 1 MiB, p99", "us");
    GZIP_SCRAPES = rate("scrapes of 143 KB", "/s");
    GZIP_SCRAPE_CPU = cost("a scrape of 143 KB, server + agent", "CPU us");
    GZIP_SCRAPE_P99 = time("a scrape of 143 KB, p99", "us");
    STALLED_1 = time("p99 beside 1 stalled reader, of without", "");
    STALLED_8 = time("p99 beside 8 stalled readers, of without", "");
    STALLED_64 = time("p99 beside 64 stalled readers, of without", "");
    STALLED_512 = time("p99 beside 512 stalled readers, of without", "");
    STALLED_MEMORY = memory("server and agent with the most readers", "MiB");
    SERVER_MEMORY = memory("server, one idle agent", "MiB");
    AGENT_MEMORY = memory("agent, idle", "MiB");
    SERVER_ANONYMOUS = memory("server, one idle agent, anonymous", "MiB");
    AGENT_ANONYMOUS = memory("agent, idle, anonymous", "MiB");
    SERVER_WAKEUPS = time("server, one idle agent, context switches", "/s");
    AGENT_WAKEUPS = time("agent, idle, context switches", "/s");
    STREAM_SERVER = memory("an idle stream, server", "KiB");
    STREAM_AGENT = memory("an idle stream, agent", "KiB");
    GIVEN_BACK = memory("memory 10 s after the streams, of before", "");
    AGENTS_100 = memory("server, each of 100 further agents, anonymous", "KiB");
    AGENTS_1000 = memory("server, each of 1000 further agents, anonymous", "KiB");
    AGENTS_10000 = memory("server, each of 10000 further agents, anonymous", "KiB");
    IDLE_10 = time("server, 10 idle agents", "cores");
    IDLE_1000 = time("server, 1000 idle agents", "cores");
    IDLE_10000 = time("server, 10000 idle agents", "cores");
    HANDSHAKE_CPU = cost("a session of 1000 agents, server", "CPU ms");
    BULK_BESIDE_10 = cost("down beside 10 agents", "CPU s/GiB");
    REQUEST_BESIDE_10 = cost("a request beside 10 agents", "CPU us");
    CONNECTION_BESIDE_10 = cost("a new connection beside 10 agents", "CPU us");
    BULK_BESIDE_1000 = cost("down beside 1000 agents", "CPU s/GiB");
    REQUEST_BESIDE_1000 = cost("a request beside 1000 agents", "CPU us");
    CONNECTION_BESIDE_1000 = cost("a new connection beside 1000 agents", "CPU us");
    BULK_BESIDE_10000 = cost("down beside 10000 agents", "CPU s/GiB");
    REQUEST_BESIDE_10000 = cost("a request beside 10000 agents", "CPU us");
    CONNECTION_BESIDE_10000 = cost("a new connection beside 10000 agents", "CPU us");
    START = time("agent start to first reply", "ms");
    AFTER_TERM = time("server TERM to first reply", "ms");
    AFTER_KILL = time("server KILL to first reply", "ms");
    ALL_BACK = time("1000 agents back after KILL", "ms");
    AGENT_SIZE = memory("agent binary", "MB");
    WAN_BULK = rate("bulk", "Mbit/s");
    WAN_NEW = time("new connection, of a round trip", "");
    WAN_BESIDE_P50 = time("small beside bulk, p50", "ms");
    WAN_BESIDE_P99 = time("small beside bulk, p99", "ms");
    FAR_FIRST_200K = time("first 200 kB of a session", "ms");
    FAR_200K = time("200 kB, p50", "ms");
    FAR_FIRST_2M = time("first 2 MB of a session", "ms");
    FAR_2M = time("2 MB, p50", "ms");
    FAR_UP_2M = time("2 MB up, p50", "ms");
    PEER_MEMORY = memory("server, each further server, anonymous", "KiB");
    ENTRY_MEMORY = memory("directory, a node of another server", "bytes");
    HERD_READY = time("all agents reached from all servers", "s");
    HERD_MEMORY = memory("three servers, each agent, anonymous", "KiB");
    HERD_DESCRIPTORS = memory("open files, server with most", "");
    HERD_SLOWEST = time("slowest request while a server is killed", "ms");
    METRICS_OF_10000 = time("metrics of 10000 nodes", "ms");
    DISCOVERY_OF_5000 = time("targets of 5000 nodes", "ms");
    CLOUD_GET = time("to the cloud, GET over new TLS, less a round trip", "ms");
    CLOUD_KUBECTL = time("to the cloud, kubectl get, less a round trip", "ms");
    CLOUD_STREAM_SERVER = memory("an idle stream to the cloud, server, anonymous", "KiB");
    CLOUD_STREAM_AGENT = memory("an idle stream to the cloud, agent, anonymous", "KiB");
    CLOUD_LIST = rate("lists of 10 MiB to the edge, of the TCP service", "");
    CLOUD_FLOODED = time("to the cloud, p99 beside a hostile agent, of without", "");
    SESSIONS_LOST = count("sessions lost");
    FAILED = count("failed");
}
